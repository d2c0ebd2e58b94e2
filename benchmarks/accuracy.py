"""Compares the output of Tandem and transformers on the same prompts.

    python -m benchmarks.accuracy [--task renames | summaries] [--data FILE.jsonl]
        [--only tandem | transformers] [--model FOLDER] [--batch-size N] [--max-new-tokens N]
        [--min-rouge1 X]

Greedy, with speculation, through gateway, drafter and verifier. The tasks are the held-out renames,
summaries of the readmes of the packages in constraints.txt (`package_summaries.py`), or the lines
of a file: JSON objects with a `prompt` and optionally a `reference`. The bundled model can only
rename; summaries need a language model.

Prints the share of equal answers, every first divergence, ROUGE-1/2/L (F measure, against the
reference; without one, Tandem's against transformers' answer) and tokens/s. With --only, one side
runs alone and is compared with the references only.

Two correct systems may differ at a near-tie: transformers' logits of both tokens are within 1e-4 of
its best. In `strict` float32 every divergence must be one; a lower dtype or `fast` only lists them.

Exit status: 0; 1 if a divergence is no near-tie where it must be, or ROUGE-1 (Tandem's, if it runs)
is under --min-rouge1; 2 for invalid arguments or data.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from benchmarks import transformers_baseline
from benchmarks.accuracy_data import DataError, Example, make_examples, read_examples
from benchmarks.machine import processor
from benchmarks.package_summaries import summary_tasks
from benchmarks.services import running_stack
from benchmarks.workloads import BUNDLED_MODEL, HELD_OUT, Task
from tandem.client import AsyncTandemClient, GenerationRequest, TandemError

NEAR_TIE = 1e-4
SIDES = ("tandem", "transformers")
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first position at which the two answers to a prompt differ.

    The gaps are the distances of the tokens below transformers' best logit there, by a forward
    pass over this sequence alone.
    """

    line: int
    position: int
    tandem_token_id: int
    transformers_token_id: int
    tandem_gap: float
    transformers_gap: float

    @property
    def is_near_tie(self) -> bool:
        return max(self.tandem_gap, self.transformers_gap) <= NEAR_TIE


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Output token ids per example, without the end token, and their speed."""

    token_ids: list[list[int]]
    tokens_per_s: float


async def ask_tandem(
    address: str, examples: Sequence[Example], *, num_streams: int, end_ids: frozenset[int]
) -> Answers:
    """Answers through the gateway, `num_streams` at a time.

    Raises:
        DataError: a prompt was refused; the message names the line.
    """
    answers: list[list[int]] = [[] for _ in examples]
    waiting = list(enumerate(examples))[::-1]
    num_tokens = 0

    async def one_stream() -> None:
        nonlocal num_tokens
        while waiting:
            index, example = waiting.pop()
            request = GenerationRequest(
                prompt=example.prompt_token_ids, max_new_tokens=example.max_new_tokens
            )
            try:
                token_ids = (await client.generate(request)).token_ids
            except TandemError as error:
                raise DataError(f"line {example.line}: {error}") from None
            num_tokens += len(token_ids)
            answers[index] = _up_to_end(token_ids, end_ids)

    async with AsyncTandemClient(address, retry=None) as client:
        started_at_s = time.perf_counter()
        await asyncio.gather(*(one_stream() for _ in range(num_streams)))
    return Answers(
        token_ids=answers, tokens_per_s=num_tokens / (time.perf_counter() - started_at_s)
    )


def ask_transformers(
    model: PreTrainedModel, examples: Sequence[Example], *, batch_size: int, end_ids: frozenset[int]
) -> Answers:
    """Answers of `generate`, in left-padded batches."""
    tasks = [
        Task(prompt_token_ids=example.prompt_token_ids, max_new_tokens=example.max_new_tokens)
        for example in examples
    ]
    started_at_s = time.perf_counter()
    outputs = transformers_baseline.answers(model, tasks, batch_size)
    duration_s = time.perf_counter() - started_at_s
    return Answers(
        token_ids=[_up_to_end(output, end_ids) for output in outputs],
        tokens_per_s=sum(map(len, outputs)) / duration_s,
    )


def _up_to_end(token_ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    ends = (index for index, token_id in enumerate(token_ids) if token_id in end_ids)
    return list(token_ids[: next(ends, len(token_ids))])


@torch.inference_mode()
def find_divergence(
    model: PreTrainedModel,
    example: Example,
    tandem: Sequence[int],
    transformers: Sequence[int],
    end_id: int,
) -> Divergence | None:
    """Compares two answers; the shorter one counts as `end_id` after its end."""
    mine, theirs = [*tandem, end_id], [*transformers, end_id]
    differing = (
        index for index, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]
    )
    position = next(differing, None)
    if position is None:
        return None
    context = torch.tensor([example.prompt_token_ids + mine[:position]])
    logits = cast(Any, model)(context, logits_to_keep=1).logits[0, -1].double()
    best = logits.max()
    return Divergence(
        line=example.line,
        position=position,
        tandem_token_id=mine[position],
        transformers_token_id=theirs[position],
        tandem_gap=float(best - logits[mine[position]]),
        transformers_gap=float(best - logits[theirs[position]]),
    )


def find_divergences(
    model: PreTrainedModel,
    examples: Sequence[Example],
    answers: Mapping[str, Answers],
    end_id: int,
) -> list[Divergence]:
    """The divergences of all examples whose two answers differ."""
    tandem, transformers = (answers[side].token_ids for side in SIDES)
    found = (
        find_divergence(model, example, mine, theirs, end_id)
        for example, mine, theirs in zip(examples, tandem, transformers, strict=True)
    )
    return [divergence for divergence in found if divergence is not None]


def rouge(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean F measures."""
    scorer = RougeScorer(list(ROUGE_TYPES))
    scores = [
        scorer.score(reference, answer)
        for answer, reference in zip(answers, references, strict=True)
    ]
    return {name: mean(score[name].fmeasure for score in scores) for name in ROUGE_TYPES}


def find_failures(
    divergences: Sequence[Divergence],
    *,
    rouge1: float | None,
    wants_near_ties: bool,
    min_rouge1: float | None,
) -> list[str]:
    """The reasons to fail, a line each. `rouge1` is None without a reference."""
    failures = [
        f"line {divergence.line}: a divergence that is no near-tie"
        for divergence in divergences
        if wants_near_ties and not divergence.is_near_tie
    ]
    if min_rouge1 is not None and rouge1 is None:
        failures.append("there is no reference for ROUGE-1")
    elif min_rouge1 is not None and rouge1 is not None and rouge1 < min_rouge1:
        failures.append(f"ROUGE-1 {rouge1:.4f} is under {min_rouge1:g}")
    return failures


def main() -> int:
    """The command; returns the exit status."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    model_folder = arguments.model.resolve()
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    try:
        examples = _examples(arguments, tokenizer)[: arguments.limit]
        result = _compare(model_folder, tokenizer, examples, arguments)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for failure in result["failures"]:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if result["failures"] else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=(__doc__ or "").split("\n")[0]
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--task", default="renames", choices=["renames", "summaries"])
    data.add_argument("--data", type=Path, help="JSON lines, instead of a task")
    parser.add_argument("--only", choices=SIDES, help="run one side only")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder")
    parser.add_argument("--batch-size", type=_count, default=16, help="streams at a time")
    parser.add_argument(
        "--max-new-tokens", type=_count, help="default: the reference's and 16 more; without, 128"
    )
    parser.add_argument("--min-rouge1", type=float, help="fail if ROUGE-1 is lower")
    parser.add_argument("--limit", type=_count, help="use at most this many prompts")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--numerics", default="strict", choices=["strict", "fast"])
    parser.add_argument("--threads", type=_count, default=1, help="of the model, in both systems")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is under 1")
    return value


def _examples(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[Example]:
    if arguments.data is None and arguments.task == "summaries":
        rows = list(enumerate(summary_tasks(), start=1))
        return make_examples(rows, "summaries", tokenizer, arguments.max_new_tokens)
    return read_examples(arguments.data or HELD_OUT, tokenizer, arguments.max_new_tokens)


def _compare(
    model_folder: Path,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Runs the chosen sides; each loads the model only if it runs."""
    end_ids = _end_ids(model_folder)
    answers: dict[str, Answers] = {}
    if arguments.only != "transformers":
        flags = ["--dtype", arguments.dtype, "--numerics", arguments.numerics]
        flags += ["--threads", str(arguments.threads)]
        with running_stack(model=model_folder, verifier_flags=flags) as stack:
            answers["tandem"] = asyncio.run(
                ask_tandem(
                    stack.gateway, examples, num_streams=arguments.batch_size, end_ids=end_ids
                )
            )
    divergences: list[Divergence] = []
    if arguments.only != "tandem":
        model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=getattr(torch, arguments.dtype)
        ).eval()
        answers["transformers"] = ask_transformers(
            model, examples, batch_size=arguments.batch_size, end_ids=end_ids
        )
        if arguments.only is None:
            divergences = find_divergences(model, examples, answers, min(end_ids, default=-1))
    scores = _scores(tokenizer, examples, answers)
    first = scores.get(next(iter(answers)))
    failures = find_failures(
        divergences,
        rouge1=first["rouge1"] if first else None,
        wants_near_ties=arguments.numerics == "strict" and arguments.dtype == "float32",
        min_rouge1=arguments.min_rouge1,
    )
    return {
        "command": "python -m benchmarks.accuracy",
        "data": str(arguments.data or arguments.task),
        "dtype": arguments.dtype,
        "numerics": arguments.numerics,
        "processor": processor(),
        "num_prompts": len(examples),
        "num_references": sum(example.reference is not None for example in examples),
        "exact_match": 1 - len(divergences) / len(examples) if len(answers) == 2 else None,
        "divergences": [
            {**asdict(divergence), "is_near_tie": divergence.is_near_tie}
            for divergence in divergences
        ],
        "rouge": scores,
        "tokens_per_s": {name: each.tokens_per_s for name, each in answers.items()},
        "failures": failures,
    }


def _end_ids(model_folder: Path) -> frozenset[int]:
    try:
        end = GenerationConfig.from_pretrained(model_folder).eos_token_id
    except OSError:
        end = getattr(AutoConfig.from_pretrained(model_folder), "eos_token_id", None)
    return frozenset([] if end is None else [end] if isinstance(end, int) else end)


def _scores(
    tokenizer: Tokenizer, examples: Sequence[Example], answers: Mapping[str, Answers]
) -> dict[str, dict[str, float]]:
    """Each side against the references; without any, Tandem against transformers."""
    texts = {name: tokenizer.decode_batch(each.token_ids) for name, each in answers.items()}
    references = {i: e.reference for i, e in enumerate(examples) if e.reference is not None}
    if references:
        return {
            name: rouge([own[i] for i in references], list(references.values()))
            for name, own in texts.items()
        }
    return {"tandem": rouge(texts["tandem"], texts["transformers"])} if len(texts) == 2 else {}


def _table(result: dict[str, Any]) -> str:
    against = "the references" if result["num_references"] else "transformers' answers"
    compared = "one side alone"
    if result["exact_match"] is not None:
        compared = f"{result['exact_match']:.1%} equal, {len(result['divergences'])} diverge"
    lines = [
        f"{result['num_prompts']} prompts, {result['dtype']}, {result['numerics']}: {compared}. "
        f"On {result['processor']}.",
        "",
        f"| against {against} | ROUGE-1 | ROUGE-2 | ROUGE-L | tokens/s |",
        "|---|---|---|---|---|",
    ]
    for name, speed in result["tokens_per_s"].items():
        scores = result["rouge"].get(name)
        cells = [f"{scores[kind]:.4f}" if scores else "-" for kind in ROUGE_TYPES]
        lines.append(f"| {name} | {' | '.join(cells)} | {speed:.0f} |")
    if result["divergences"]:
        lines += [
            "",
            "| line | output position | Tandem, below best | transformers, below best | |",
        ]
        lines.append("|---|---|---|---|---|")
    for row in result["divergences"]:
        lines.append(
            f"| {row['line']} | {row['position']} "
            f"| {row['tandem_token_id']}, {row['tandem_gap']:.2e} "
            f"| {row['transformers_token_id']}, {row['transformers_gap']:.2e} "
            f"| {'near-tie' if row['is_near_tie'] else 'differs'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
