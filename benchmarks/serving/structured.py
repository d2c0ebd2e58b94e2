"""JSON that echoes its input: by a schema and without one, with drafts and without.

The schema says the keys and the types, so the model chooses the values. All variants copy the same
records, one step per token without drafts: what the schema costs a step is the ratio without them.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.ratios import median_interval, ratios
from benchmarks.serving.setting import Setting
from benchmarks.serving.turns import Goal, Measure, RowResult, Variant, by_turns
from benchmarks.workloads import Task
from tandem.client import StructuredOutput, Usage

STREAMS = (1, 16)
SCHEMA_GOAL, SPECULATION_GOAL = 0.9, 1.5
NUM_RECORDS = 8
_NAMES = ("total", "price", "result", "count", "index", "value", "limit", "offset")
SCHEMA = StructuredOutput(
    json_schema={
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "size": {"type": "integer"},
                "is_set": {"type": "boolean"},
            },
            "required": ["name", "size", "is_set"],
            "additionalProperties": False,
        },
    }
)


async def measure(setting: Setting) -> RowResult:
    _, client = await setting.stack()
    measures: list[Measure] = []
    variants: list[Variant] = []
    for streams in STREAMS:
        if streams not in setting.streams:
            continue
        tasks = echo_tasks(
            setting.model,
            max(setting.amount.prompts, streams if streams > 1 else 1),
            setting.amount.max_new_tokens,
        )
        usages: dict[tuple[bool, bool], Sequence[Usage]] = {}

        def variant(
            has_schema: bool,
            speculate: bool,
            streams: int = streams,
            tasks: Sequence[Task] = tasks,
            usages: dict[tuple[bool, bool], Sequence[Usage]] = usages,
        ) -> Variant:
            def keep(turn: Sequence[Usage]) -> None:
                usages[has_schema, speculate] = turn

            return setting.through_services(
                client,
                tasks,
                streams,
                speculate=speculate,
                name=f"{'schema' if has_schema else 'no schema'}, {'on' if speculate else 'off'}",
                structured_output=SCHEMA if has_schema else None,
                observe=keep,
            )

        free, plain, drafted = variant(False, False), variant(True, False), variant(True, True)
        await by_turns([free, plain, drafted], setting.amount.rounds, setting.say)
        num_steps = sum(usage.num_steps for usage in usages[True, True])
        num_tokens = sum(usage.output_tokens for usage in usages[True, True])
        for what, above, below, goal, note in (
            ("schema / none, speculation off", plain, free, SCHEMA_GOAL, ""),
            (
                "by a schema, speculation on / off",
                drafted,
                plain,
                SPECULATION_GOAL,
                f", {num_tokens / num_steps:.1f} tokens per step",
            ),
        ):
            measures.append(
                Measure(
                    row="structured",
                    what=what,
                    streams=streams,
                    dtype=setting.dtype,
                    value=median_interval(ratios(above.figures, below.figures)),
                    goal=Goal(value=goal),
                    note=f"{above.median:,.0f} and {below.median:,.0f} tokens/s "
                    f"({above.name}; {below.name}){note}",
                )
            )
        variants += [free, plain, drafted]
    return RowResult(measures=measures, variants=variants)


def echo_tasks(model: Path, count: int, max_new_tokens: int) -> list[Task]:
    """Prompts whose answer copies some records; an answer may be a little longer than they are."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    draw = random.Random(2026)
    tasks = []
    for _ in range(count):
        records = json.dumps(
            [
                {
                    "name": draw.choice(_NAMES),
                    "size": draw.randrange(100),
                    "is_set": draw.random() < 0.5,
                }
                for _ in range(NUM_RECORDS)
            ]
        )
        prompt = f"<|code|>{records}<|rename|>name<|to|>name<|out|>"
        num_tokens = len(tokenizer.encode(records, add_special_tokens=False).ids)
        tasks.append(
            Task(
                prompt_token_ids=tokenizer.encode(prompt, add_special_tokens=False).ids,
                max_new_tokens=min(num_tokens + 16, max_new_tokens),
            )
        )
    return tasks
