"""Does Tandem say what transformers says? Both answer the same prompts, side by side.

    python -m benchmarks.accuracy [--data FILE.jsonl] [--model FOLDER] [--batch-size N]
        [--max-new-tokens N] [--min-rouge1 X]

Greedy, with speculation, through gateway, drafter and verifier. A line of the data is a JSON
object with a `prompt` and, if there is one, a `reference`; so any summarisation set can be run.
Without --data: the held-out renames.

Prints the share of equal answers, every first divergence, ROUGE-1/2/L (F measure, against the
reference; where there is none, Tandem's against transformers' answer) and tokens/s.

Two correct systems may differ where the model itself hardly does: a divergence is a near-tie when
transformers' logits of both tokens are within 1e-4 of its best. In `strict` float32 each must be
one; a lower dtype or `fast` only lists them.

Exit status: 0; 1 if a divergence had to be a near-tie and is none, or ROUGE-1 is under
--min-rouge1; 2 for arguments or data that cannot be used.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.machine import processor
from benchmarks.services import running_stack
from benchmarks.workloads import BUNDLED_MODEL, HELD_OUT
from tandem.client import AsyncTandemClient, GenerationRequest, TandemError

NEAR_TIE = 1e-4
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


class DataError(Exception):
    """The data cannot be used; the message names the file and the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One line of the data."""

    line: int
    prompt_token_ids: list[int]
    reference: str | None
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place at which the two answers to a prompt differ.

    The gaps say how far each one's token is below transformers' best logit there, by a forward
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
    """Output token ids per example, without the end token, and how fast they came."""

    token_ids: list[list[int]]
    tokens_per_s: float


def read_examples(path: Path, tokenizer: Tokenizer, max_new_tokens: int | None) -> list[Example]:
    """Reads the data; without `max_new_tokens`, answers may be a little longer than the reference.

    Raises:
        DataError: a line is not an object with a `prompt`, or there is none.
    """
    examples = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise DataError(f"{path}:{number}: wants an object with a text `prompt`")
        reference = row.get("reference")
        if not isinstance(reference, str | None):
            raise DataError(f"{path}:{number}: `reference` is not text")
        prompt_token_ids = tokenizer.encode(row["prompt"], add_special_tokens=False).ids
        if not prompt_token_ids:
            raise DataError(f"{path}:{number}: `prompt` is empty")
        length = len(tokenizer.encode(reference).ids) + 16 if reference else 128
        examples.append(
            Example(
                line=number,
                prompt_token_ids=prompt_token_ids,
                reference=reference,
                max_new_tokens=max_new_tokens or length,
            )
        )
    if not examples:
        raise DataError(f"{path}: no line")
    return examples


async def ask_tandem(
    address: str, examples: Sequence[Example], *, num_streams: int, end_ids: frozenset[int]
) -> Answers:
    """Answers through the gateway, `num_streams` at a time.

    Raises:
        DataError: a prompt was refused; it names the line.
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

    async with AsyncTandemClient(address) as client:
        started_at_s = time.perf_counter()
        await asyncio.gather(*(one_stream() for _ in range(num_streams)))
    return Answers(
        token_ids=answers, tokens_per_s=num_tokens / (time.perf_counter() - started_at_s)
    )


def ask_transformers(
    model: PreTrainedModel, examples: Sequence[Example], *, batch_size: int, end_ids: frozenset[int]
) -> Answers:
    """Answers by `generate`, in batches padded on the left."""
    answers = []
    num_tokens = 0
    pad_id = min(end_ids, default=0)
    started_at_s = time.perf_counter()
    for start in range(0, len(examples), batch_size):
        batch = examples[start : start + batch_size]
        width = max(len(example.prompt_token_ids) for example in batch)
        padding = [width - len(example.prompt_token_ids) for example in batch]
        output = cast(Any, model).generate(
            torch.tensor(
                [
                    [pad_id] * pad + example.prompt_token_ids
                    for pad, example in zip(padding, batch, strict=True)
                ]
            ),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
            max_new_tokens=max(example.max_new_tokens for example in batch),
            do_sample=False,
            pad_token_id=pad_id,
        )
        for row, example in zip(output[:, width:].tolist(), batch, strict=True):
            token_ids = _up_to_end(row[: example.max_new_tokens], end_ids)
            num_tokens += min(len(token_ids) + 1, example.max_new_tokens)
            answers.append(token_ids)
    return Answers(
        token_ids=answers, tokens_per_s=num_tokens / (time.perf_counter() - started_at_s)
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
    """Compares two answers; one that stops before the other says `end_id` there."""
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
    rouge1: float,
    wants_near_ties: bool,
    min_rouge1: float | None,
) -> list[str]:
    """Why the command fails, a line each."""
    failures = [
        f"line {divergence.line}: a divergence that is no near-tie"
        for divergence in divergences
        if wants_near_ties and not divergence.is_near_tie
    ]
    if min_rouge1 is not None and rouge1 < min_rouge1:
        failures.append(f"ROUGE-1 {rouge1:.4f} is under {min_rouge1:g}")
    return failures


def main() -> int:
    """The command; returns the exit status."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    model_folder = arguments.model.resolve()
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    try:
        examples = read_examples(arguments.data, tokenizer, arguments.max_new_tokens)
        examples = examples[: arguments.limit]
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
    parser.add_argument("--data", type=Path, default=HELD_OUT, help="JSON lines")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder")
    parser.add_argument("--batch-size", type=_count, default=16, help="streams at a time")
    parser.add_argument(
        "--max-new-tokens", type=_count, help="default: the reference's and 16 more; without, 128"
    )
    parser.add_argument("--min-rouge1", type=float, help="fail if Tandem's ROUGE-1 is lower")
    parser.add_argument("--limit", type=_count, help="only so many prompts")
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


def _compare(
    model_folder: Path,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=getattr(torch, arguments.dtype)
    ).eval()
    end = model.generation_config.eos_token_id
    end_ids = frozenset([] if end is None else [end] if isinstance(end, int) else end)
    flags = ["--dtype", arguments.dtype, "--numerics", arguments.numerics]
    flags += ["--threads", str(arguments.threads)]
    with running_stack(model=model_folder, verifier_flags=flags) as stack:
        tandem = asyncio.run(
            ask_tandem(stack.gateway, examples, num_streams=arguments.batch_size, end_ids=end_ids)
        )
    transformers = ask_transformers(
        model, examples, batch_size=arguments.batch_size, end_ids=end_ids
    )
    divergences = [
        divergence
        for example, mine, theirs in zip(
            examples, tandem.token_ids, transformers.token_ids, strict=True
        )
        if (divergence := find_divergence(model, example, mine, theirs, min(end_ids, default=-1)))
    ]
    texts = [tokenizer.decode_batch(answers.token_ids) for answers in (tandem, transformers)]
    with_reference = [i for i, example in enumerate(examples) if example.reference is not None]
    scores: dict[str, dict[str, float]] = {}
    if with_reference:
        references = [cast(str, examples[i].reference) for i in with_reference]
        for name, answers in zip(("tandem", "transformers"), texts, strict=True):
            scores[name] = rouge([answers[i] for i in with_reference], references)
    else:
        scores["tandem"] = rouge(*texts)
    failures = find_failures(
        divergences,
        rouge1=scores["tandem"]["rouge1"],
        wants_near_ties=arguments.numerics == "strict" and arguments.dtype == "float32",
        min_rouge1=arguments.min_rouge1,
    )
    return {
        "command": "python -m benchmarks.accuracy",
        "dtype": arguments.dtype,
        "numerics": arguments.numerics,
        "processor": processor(),
        "num_prompts": len(examples),
        "num_references": len(with_reference),
        "exact_match": 1 - len(divergences) / len(examples),
        "divergences": [
            {**asdict(divergence), "is_near_tie": divergence.is_near_tie}
            for divergence in divergences
        ],
        "rouge": scores,
        "tokens_per_s": {
            "tandem": tandem.tokens_per_s,
            "transformers": transformers.tokens_per_s,
        },
        "failures": failures,
    }


def _table(result: dict[str, Any]) -> str:
    against = "the references" if result["num_references"] else "transformers' answers"
    lines = [
        f"{result['num_prompts']} prompts, {result['dtype']}, {result['numerics']}: "
        f"{result['exact_match']:.1%} equal, {len(result['divergences'])} diverge. "
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
