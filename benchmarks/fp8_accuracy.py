"""Accuracy of FP8: logits and greedy output against the model without quantization, of weights in
FP8 and of activations with them.

    python -m benchmarks.fp8_accuracy [--model FOLDER] [--data FILE.jsonl] [--prompts 32]
                                      [--dtype bfloat16] [--max-new-tokens 128] [--json FILE]

Models are loaded as in the verifier. The unquantised model continues each held-out prompt greedily;
then every model scores that text, so all see the same context at each position. A prompt agrees if
the quantised model would have given the same tokens throughout. The unquantised model in another
dtype stands beside it, to tell quantisation from ordinary rounding. Activations are in FP8 on a GPU
only; here, plain torch computes what a GPU computes.

Exit status 1 if less than --min-agreement of the tokens agree, with any quantised model.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from benchmarks.machine import processor
from benchmarks.workloads import BUNDLED_MODEL, HELD_OUT
from verifier.model.checkpoint import load_checkpoint, reference_logits
from verifier.model.fp8_weights import Fp8Linear

CPU = torch.device("cpu")


@dataclass(slots=True, kw_only=True)
class Comparison:
    """A model against the reference, over all generated positions."""

    name: str
    num_tokens: int = 0
    num_agreeing: int = 0  # positions whose likeliest token is the reference's
    num_prompts: int = 0
    num_prompts_agreeing: int = 0  # at every position
    kl_sum: float = 0.0  # KL(reference || model), nats
    largest_logprob_error: float = 0.0  # of the reference's tokens, nats

    def add(self, reference: torch.Tensor, logits: torch.Tensor) -> None:
        """Counts one prompt's rows [T, V] of both models."""
        token_ids = reference.argmax(dim=-1)
        agrees = logits.argmax(dim=-1) == token_ids
        expected, other = reference.log_softmax(dim=-1), logits.log_softmax(dim=-1)
        self.num_tokens += len(token_ids)
        self.num_agreeing += int(agrees.sum())
        self.num_prompts += 1
        self.num_prompts_agreeing += int(agrees.all())
        self.kl_sum += float((expected.exp() * (expected - other)).sum())
        errors = (expected - other).gather(-1, token_ids[:, None]).abs()
        self.largest_logprob_error = max(self.largest_logprob_error, float(errors.max()))

    @property
    def agreement(self) -> float:
        return self.num_agreeing / self.num_tokens

    def row(self) -> str:
        return (
            f"| {self.name} | {self.agreement:.2%} | {self.num_prompts_agreeing} of "
            f"{self.num_prompts} | {self.kl_sum / self.num_tokens:.2g} | "
            f"{self.largest_logprob_error:.2g} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    reference = _load(options.model, options.dtype, "none")
    quantised = {
        f"{options.dtype}, fp8 weights": _load(options.model, options.dtype, "fp8"),
        f"{options.dtype}, fp8 weights and activations": _as_on_gpu(
            _load(options.model, options.dtype, "fp8")
        ),
    }
    compared = dict(quantised)
    if options.dtype != "float32":
        compared["float32"] = _load(options.model, "float32", "none")
    comparisons = {name: Comparison(name=name) for name in compared}
    for prompt in _prompts(options.model, options.data, options.prompts):
        text = _greedy(reference, prompt, options.max_new_tokens)
        rows = slice(len(prompt) - 1, len(text) - 1)
        expected = reference_logits(reference, text)[rows].double()
        for name, model in compared.items():
            comparisons[name].add(expected, reference_logits(model, text)[rows].double())
    num_tokens = next(iter(comparisons.values())).num_tokens
    print(
        f"{options.model.name}, against {options.dtype}: {num_tokens} greedy tokens, {processor()}"
    )
    print()
    print("| model | same likeliest token | same text | KL per token | largest logprob error |")
    print("|---|---|---|---|---|")
    for comparison in comparisons.values():
        print(comparison.row())
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(c) for c in comparisons.values()], indent=2))
    worst = min(comparisons[name].agreement for name in quantised)
    if not worst >= options.min_agreement:
        print(f"only {worst:.2%} of the tokens agree", file=sys.stderr)
        return 1
    return 0


def _load(folder: Path, dtype: str, quantization: str) -> PreTrainedModel:
    return load_checkpoint(folder, dtype=dtype, device=CPU, quantization=quantization).model


def _as_on_gpu(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.rounds_rows = True
    return model


def _prompts(model: Path, data: Path, count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with data.open() as lines:
        prompts = [json.loads(line)["prompt"] for line in lines][:count]
    return [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]


def _greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The prompt and its greedy continuation, by transformers' own attention and cache."""
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        output = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]), do_sample=False, max_new_tokens=max_new_tokens
        )
    finally:
        model.set_attn_implementation(own)
    token_ids: list[int] = output[0].tolist()
    return token_ids


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_accuracy")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--data", type=Path, default=HELD_OUT, help='lines with a "prompt"')
    parser.add_argument("--prompts", type=int, default=32, help="how many of them")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--min-agreement", type=float, default=-math.inf, help="0 to 1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
