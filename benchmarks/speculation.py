"""The verifier's own number of drafts against fixed ones, and against none.

    python -m benchmarks.speculation [--dtypes float32 bfloat16] [--streams 1 4 16 64]
                                     [--texts renames source documents random] [--json FILE]

The engine in one process, with drafts from the drafter's own kernel: verifying as many as the
verifier chooses, and at most 0, 1, 3, 7, 15 and 31 per sequence and step, all by turns. The model
says of renames what it says; of source code and documents the text itself, at the cost of its
forward pass; and random text never repeats. The drafting itself, which is another process's work in
the system, is left out of a run's time.

A ratio is the median over the rounds of the learned number's tokens per second over a fixed one's
in the same round, with the 95 % bootstrap interval of that median. For each round, the fixed number
that is the best is chosen by the other half of the rounds: chosen by all, the luckiest of equal
numbers would win, and the ratio would be too low. A cell ends when its intervals lie on one side of
the goals, or after --seconds. A figure that misses its goal is bold.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.arguments import add_model, command_parser, write_figures
from benchmarks.forced_texts import ForcedTexts
from benchmarks.held_out_texts import held_out_texts
from benchmarks.in_process import InProcessEngine
from benchmarks.machine import processor
from benchmarks.ratios import median_interval, ratios
from benchmarks.report import Goal, Measure, measures_table
from benchmarks.turns import Variant, blocking, by_turns
from benchmarks.workloads import Task, random_tasks, rename_tasks
from servicekit.logs import configure_logs
from verifier.batch.host_step import ComputesLogits
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig

FIXED = (0, 1, 3, 7, 15, 31)
TEXTS = ("renames", "source", "documents", "random")
PROMPT_TOKENS, OUTPUT_TOKENS = 500, 200
OF_BEST_GOAL, ON_OFF_GOAL = 0.97, 0.98
# By the number of drafts; None: what the verifier chooses.
Speeds = dict[int | None, Variant]


async def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    measures: list[Measure] = []
    for dtype in arguments.dtypes:
        config = VerifierConfig.model_validate(
            {
                "model": arguments.model.resolve(),
                "device": "cpu",
                "dtype": dtype,
                "threads": arguments.threads,
                "numerics": "strict",
                "prefix_cache": False,
            }
        )
        loaded = load_model(config)
        for text, streams in itertools.product(arguments.texts, arguments.streams):
            measures += await _measure(config, loaded, text, streams, arguments)
            figures = {"measures": [asdict(measure) for measure in measures]}
            write_figures("speculation", arguments, figures)
    print(f"{arguments.threads} model threads, {processor()}\n\n{measures_table(measures)}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("speculation", __doc__)
    add_model(parser)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--rounds", type=int, default=6, help="at least so many")
    parser.add_argument("--seconds", type=float, default=45.0, help="of rounds, at most, by cell")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.dtypes, arguments.streams, arguments.rounds = ["float32"], [1], 1
        arguments.seconds = 0.0
    return arguments


async def _measure(
    config: VerifierConfig,
    loaded: LoadedModel,
    text: str,
    streams: int,
    arguments: argparse.Namespace,
) -> list[Measure]:
    tasks, loaded = _tasks(config.model, loaded, text, streams, quick=arguments.quick)
    with contextlib.ExitStack() as stack:
        learning, limited = (
            stack.enter_context(
                InProcessEngine(
                    config.model_copy(update={"speculation_depth": depth}), loaded
                ).started()
            )
            for depth in ("learned", "limits")
        )
        speeds: Speeds = {None: _variant(learning, tasks, streams, None)}
        speeds |= {most: _variant(limited, tasks, streams, most) for most in FIXED}
        end_s = time.perf_counter() + arguments.seconds

        def is_enough() -> bool:
            if len(speeds[None].figures) < arguments.rounds:
                return False
            return time.perf_counter() > end_s or all(
                each.goal is not None
                and (each.value.low >= each.goal.value or each.value.high < each.goal.value)
                for each in _measures(speeds, text, streams, str(config.dtype))
            )

        await by_turns(list(speeds.values()), 1 << 30, is_enough)
    return _measures(speeds, text, streams, str(config.dtype))


def _variant(
    engine: InProcessEngine, tasks: Sequence[Task], streams: int, most: int | None
) -> Variant:
    def tokens_per_s() -> float:
        started_at_s = time.perf_counter()
        counts = engine.run(tasks, streams=streams, speculate=most != 0, max_drafts=most)
        return counts.num_tokens / (time.perf_counter() - started_at_s - counts.draft_s)

    return blocking("learned" if most is None else f"K {most}", streams, tokens_per_s)


def _measures(speeds: Speeds, text: str, streams: int, dtype: str) -> list[Measure]:
    learned, none = speeds[None], speeds[0]
    rounds = range(len(learned.figures))

    def fastest(chosen: Sequence[int]) -> Variant:
        return max(
            (speeds[most] for most in FIXED),
            key=lambda each: statistics.median(each.figures[i] for i in chosen),
        )

    # By the parity of a round: the best of the others.
    best = [fastest([i for i in rounds if i % 2 != parity] or rounds) for parity in (0, 1)]
    of_best = [learned.figures[i] / best[i % 2].figures[i] for i in rounds]
    on_off = ratios(learned.figures, none.figures)
    found = fastest(rounds)
    return [
        Measure(
            row=text,
            what=what,
            streams=streams,
            dtype=dtype,
            value=median_interval(values),
            goal=Goal(value=goal),
            note=f"{learned.median:,.0f} and {below.median:,.0f} tokens/s (learned, "
            f"{below.name}), {len(rounds)} rounds",
        )
        for what, values, goal, below in (
            ("learned / best fixed", of_best, OF_BEST_GOAL, found),
            ("on / off", on_off, ON_OFF_GOAL, none),
        )
    ]


def _tasks(
    model: Path, loaded: LoadedModel, text: str, streams: int, *, quick: bool
) -> tuple[Sequence[Task], LoadedModel]:
    """Tasks for the streams, and the model that answers them."""
    # So some streams go on with a second task.
    count = 1 if quick else max(8, streams + min(8, streams // 2))
    if text == "renames":
        return rename_tasks(model, count), loaded
    if text == "random":
        return random_tasks(loaded.served.vocab_size, count), loaded
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    pieces = _pieces(held_out_texts(tokenizer, text), count)
    assert isinstance(loaded.model, ComputesLogits), "logits do not come to the host"
    forced = ForcedTexts(loaded.model, pieces)
    return [task for task, _ in pieces], replace(loaded, model=forced)


def _pieces(texts: Sequence[Sequence[int]], count: int) -> list[tuple[Task, Sequence[int]]]:
    """The first pieces of all texts, then the second ones, and so on."""
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    pieces: list[tuple[Task, Sequence[int]]] = []
    for start in range(0, len(texts[0]) - length, OUTPUT_TOKENS):
        for text in texts:
            prompt = text[start : start + PROMPT_TOKENS]
            coming = text[start + PROMPT_TOKENS : start + length]
            task = Task(prompt_token_ids=prompt, max_new_tokens=len(coming))
            pieces.append((task, coming))
    assert len(pieces) >= count
    return pieces[:count]


if __name__ == "__main__":
    # stdout is the table's.
    configure_logs("warning", "benchmark")
    asyncio.run(main())
