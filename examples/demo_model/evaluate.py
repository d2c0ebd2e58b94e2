"""Measures a model on the held-out rename tasks: teacher-forced accuracy and whole answers.

Knows the rows of `heldout.jsonl` and the interface of transformers' causal models; nothing of
training. Prints one JSON object:

    python examples/demo_model/evaluate.py --model examples/demo_model/model --generate
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

if not __package__:  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.demo_model.dataset import (
    END,
    HELDOUT_FILE,
    MODEL_FOLDER,
    read_heldout,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherForced:
    """Next-token hits over the references' tokens; the end token after each is not counted."""

    num_tasks: int
    num_tokens: int
    num_right_tokens: int
    num_right_tasks: int  # nothing wrong, the end token included: greedy decoding is exact here

    @property
    def token_accuracy(self) -> float:
        return self.num_right_tokens / self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAnswers:
    """Whole answers by greedy decoding: right only with the end token in its place."""

    num_tasks: int
    num_exact: int
    num_output_tokens: int
    seconds: float


def load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal model of a checkpoint folder, on the CPU, ready for inference."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval()
    return model


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def teacher_forced(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    rows: Sequence[dict[str, str]],
    batch_size: int = 8,
) -> TeacherForced:
    """Share of reference tokens that are the model's first choice, given all right ones before."""
    (end_id,) = tokenizer.encode(END).ids
    num_right_tokens = num_tokens = num_right_tasks = 0
    for batch in _batches(tokenizer, rows, batch_size):
        longest = max(len(prompt) + len(answer) for prompt, answer in batch)
        # Padding on the right needs no mask: causal attention keeps it out of earlier positions.
        token_ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for i, (prompt, answer) in enumerate(batch):
            token_ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        logits = model(input_ids=token_ids, use_cache=False).logits  # [B, longest, V]
        for i, (prompt, answer) in enumerate(batch):
            # The logits at position j choose the token at j + 1.
            first = len(prompt) - 1
            chosen = logits[i, first : first + len(answer) + 1].argmax(dim=-1)
            right = chosen == torch.tensor([*answer, end_id])
            num_right_tokens += int(right[:-1].sum())
            num_tokens += len(answer)
            num_right_tasks += bool(right.all())
    return TeacherForced(
        num_tasks=len(rows),
        num_tokens=num_tokens,
        num_right_tokens=num_right_tokens,
        num_right_tasks=num_right_tasks,
    )


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    rows: Sequence[dict[str, str]],
    prompt_lookup_num_tokens: int | None = None,
) -> GreedyAnswers:
    """Answers each prompt with transformers' greedy decoding, one by one.

    A right answer is as long as the reference and its end token, so decoding stops there.
    """
    (end_id,) = tokenizer.encode(END).ids
    num_exact = num_output_tokens = 0
    started = time.perf_counter()
    for row in rows:
        prompt = torch.tensor([tokenizer.encode(row["prompt"]).ids])
        reference = [*tokenizer.encode(row["reference"]).ids, end_id]
        output = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=len(reference),
            pad_token_id=end_id,
            eos_token_id=end_id,
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
        )
        answer = output[0, prompt.shape[1] :].tolist()
        num_output_tokens += len(answer)
        # Compared as text: the same text can be cut into tokens in more than one way.
        num_exact += answer[-1] == end_id and (
            tokenizer.decode(answer, skip_special_tokens=False) == row["reference"] + END
        )
    return GreedyAnswers(
        num_tasks=len(rows),
        num_exact=num_exact,
        num_output_tokens=num_output_tokens,
        seconds=time.perf_counter() - started,
    )


def _batches(
    tokenizer: Tokenizer, rows: Sequence[dict[str, str]], batch_size: int
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Batches of (prompt ids, reference ids), alike in length so that little is padding."""
    encoded = [
        (tokenizer.encode(row["prompt"]).ids, tokenizer.encode(row["reference"]).ids)
        for row in rows
    ]
    encoded.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    for start in range(0, len(encoded), batch_size):
        yield encoded[start : start + batch_size]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a model on the held-out rename tasks.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="checkpoint folder")
    parser.add_argument("--heldout", type=Path, default=HELDOUT_FILE, help="JSON lines of tasks")
    parser.add_argument("--limit", type=int, help="this many tasks, spread evenly")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--generate", action="store_true", help="decode whole answers too")
    parser.add_argument(
        "--prompt-lookup", type=int, metavar="K", help="with --generate: drafts of K tokens"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    model = load_model(arguments.model, getattr(torch, arguments.dtype))
    tokenizer = load_tokenizer(arguments.model)
    rows = read_heldout(arguments.heldout, arguments.limit)
    forced = teacher_forced(model, tokenizer, rows)
    report: dict[str, object] = {
        "dtype": arguments.dtype,
        "tasks": forced.num_tasks,
        "edited_tokens": forced.num_tokens,
        "token_accuracy": round(forced.token_accuracy, 4),
        "tasks_without_error": round(forced.num_right_tasks / forced.num_tasks, 4),
    }
    if arguments.generate:
        greedy = greedy_answers(model, tokenizer, rows, arguments.prompt_lookup)
        report |= {
            "exact_answers": round(greedy.num_exact / greedy.num_tasks, 4),
            "output_tokens": greedy.num_output_tokens,
            "output_tokens_per_second": round(greedy.num_output_tokens / greedy.seconds, 1),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
