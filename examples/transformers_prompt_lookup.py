"""transformers' generation with drafts from a Tandem drafter: same output, fewer model steps.

    python examples/transformers_prompt_lookup.py
    python examples/transformers_prompt_lookup.py --drafter HOST:PORT

Decodes a few held-out prompts greedily with the bundled model in float32: without drafts, with
transformers' own prompt lookup in this process, and with a drafter over gRPC (started here unless
named), with the same options and with better ones. Shows that the output is the same, and the
tokens per model step.

`RemotePromptLookup` is a `CandidateGenerator` of transformers, used through the public
`custom_generate` hook: `generate` prepares its arguments as usual and then calls `verify_drafts` to
decode. Only transformers' public interface is used. (Its own loop for candidate generators can be
called only through the private `_assisted_decoding` and `_get_candidate_generator`.)
"""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator  # type: ignore[attr-defined]

if not __package__:  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.demo_model.dataset import END, MODEL_FOLDER, read_heldout
from examples.demo_model.evaluate import load_model, load_tokenizer
from tandem.client import DrafterClient, NgramParams, TandemError
from tandem.ready_line import parse_ready_line

NUM_DRAFT_TOKENS = 10
# If the drafter answers later than this, the step runs without a draft.
DRAFT_TIMEOUT_S = 1.0

# As transformers' prompt lookup: n-grams of 2, then 1, the earliest occurrence.
AS_TRANSFORMERS = NgramParams(min_ngram=1, max_ngram=2, overlap="allowed", tie="earliest")
LONGER_NGRAMS = NgramParams(min_ngram=1, max_ngram=5)


class RemotePromptLookup(CandidateGenerator):
    """Candidates from a drafter, for the one sequence of a `generate` call.

    Each call passes the whole of `input_ids`; the client sends only what the drafter lacks.
    """

    def __init__(
        self,
        drafter: DrafterClient,
        *,
        params: NgramParams,
        max_length: int,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
    ) -> None:
        self._drafter = drafter
        self._num_draft_tokens = num_draft_tokens
        # Every step adds one token after the draft.
        self._sequence = drafter.open(params=params, max_length=max_length - 1)

    def get_candidates(  # type: ignore[override]  # its annotation has no None
        self, input_ids: torch.LongTensor, **_: Any
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Returns input_ids [1, L] with the draft appended, [1, L + K], and no logits."""
        try:
            draft = self._drafter.propose(
                self._sequence,
                input_ids[0].tolist(),
                max_draft_tokens=self._num_draft_tokens,
                timeout_s=DRAFT_TIMEOUT_S,
            )
        except TandemError as error:
            print(f"no draft: {error}", file=sys.stderr)
            return input_ids, None
        draft_ids = input_ids.new_tensor([draft.token_ids]).reshape(1, -1)
        return torch.cat([input_ids, draft_ids], dim=1), None  # type: ignore[return-value]

    def close(self) -> None:
        """Releases the sequence."""
        self._drafter.release(self._sequence, timeout_s=DRAFT_TIMEOUT_S)


def verify_drafts(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    candidate_generator: CandidateGenerator,
    **model_kwargs: Any,
) -> torch.LongTensor:
    """Decodes greedily, several tokens a step; the `custom_generate` of `generate`.

    Args:
        model: a causal model with full attention, whose cache can be cropped.
        input_ids: the prompt, [1, L].
        logits_processor: of `generate`.
        stopping_criteria: of `generate`; evaluated after every token.
        generation_config: of `generate`.
        candidate_generator: an argument of `generate`, which passes on the names of this signature.
        model_kwargs: the cache and the attention mask, prepared by `generate`.

    Returns:
        Prompt and output, [1, L + N].
    """
    attention_mask = model_kwargs.get("attention_mask")
    if len(input_ids) != 1 or not (attention_mask is None or attention_mask.all()):
        raise ValueError("needs one prompt without padding: drafts differ in length")
    if generation_config.do_sample:
        raise ValueError("this loop is greedy; set do_sample=False")
    # Its name since transformers 5.24, and before.
    cache_name = "cache" if "cache" in model_kwargs else "past_key_values"
    cache = model_kwargs[cache_name]
    while True:
        length = input_ids.shape[1]
        candidate_ids, _ = candidate_generator.get_candidates(input_ids)
        num_draft_tokens = candidate_ids.shape[1] - length
        outputs = model(
            input_ids=candidate_ids[:, cache.get_seq_length() :],
            use_cache=True,
            logits_to_keep=num_draft_tokens + 1,
            **{cache_name: cache},
        )
        # Row j decides the token at length + j, after j accepted drafts.
        for j, logits in enumerate(outputs.logits[0].float()):
            token = logits_processor(input_ids, logits[None]).argmax(dim=-1, keepdim=True)
            input_ids = torch.cat([input_ids, token], dim=1)  # type: ignore[assignment]
            if stopping_criteria(input_ids, None).all():
                return input_ids
            if j == num_draft_tokens or token != candidate_ids[:, length + j]:
                break
        # Drop the K/V of rejected drafts. The last token has no K/V yet: the model just chose it.
        num_wrong = cache.get_seq_length() - (input_ids.shape[1] - 1)
        if num_wrong:
            cache.crop(-num_wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The outputs for all prompts, and the number of model steps."""

    outputs: tuple[tuple[int, ...], ...]
    num_steps: int

    @property
    def num_tokens(self) -> int:
        return sum(len(output) for output in self.outputs)

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps


def decode_all(
    model: PreTrainedModel,
    prompts: list[list[int]],
    end_id: int,
    max_new_tokens: int,
    options: Callable[[int], contextlib.AbstractContextManager[dict[str, Any]]],
) -> Decoded:
    """Decodes each prompt with further options of `generate`, made for each prompt's length limit.

    A step is a call of the model; the first of each prompt computes the prompt.
    """
    num_steps = 0

    def count_step(*_: object) -> None:
        nonlocal num_steps
        num_steps += 1

    outputs = []
    counting = model.register_forward_hook(count_step)
    for prompt in prompts:
        input_ids = torch.tensor([prompt])
        with options(len(prompt) + max_new_tokens) as more:
            output = model.generate(  # type: ignore[operator]
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=end_id,
                eos_token_id=end_id,
                **more,
            )
        outputs.append(tuple(output[0, len(prompt) :].tolist()))
    counting.remove()
    return Decoded(outputs=tuple(outputs), num_steps=num_steps)


@contextlib.contextmanager
def fixed_options(_: int, **options: Any) -> Iterator[dict[str, Any]]:
    yield options


@contextlib.contextmanager
def remote_options(
    max_length: int, *, drafter: DrafterClient, params: NgramParams
) -> Iterator[dict[str, Any]]:
    """The options with which `generate` uses a drafter's candidates."""
    lookup = RemotePromptLookup(drafter, params=params, max_length=max_length)
    yield {"custom_generate": verify_drafts, "candidate_generator": lookup}
    lookup.close()


@contextlib.contextmanager
def local_drafter() -> Iterator[str]:
    """A drafter process on a free port during the block; yields its address."""
    command = [sys.executable, "-m", "drafter", "--listen", "127.0.0.1:0"]
    command += ["--metrics-listen", "127.0.0.1:0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            # The line comes once its kernels are compiled; the output ends if it fails.
            addresses = parse_ready_line(process.stdout.readline())
            if addresses is None:
                raise RuntimeError(f"the drafter did not start: it ended with {process.wait()}")
            yield addresses["grpc"]
        finally:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--drafter", metavar="HOST:PORT", help="a running one (default: our own)")
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # for so small a model, waiting for other threads costs more
    model = load_model(MODEL_FOLDER, torch.float32)
    tokenizer = load_tokenizer(MODEL_FOLDER)
    (end_id,) = tokenizer.encode(END).ids
    rows = read_heldout(limit=arguments.prompts)
    prompts = [tokenizer.encode(row["prompt"]).ids for row in rows]

    with contextlib.ExitStack() as stack:
        address = arguments.drafter or stack.enter_context(local_drafter())
        drafter = stack.enter_context(DrafterClient(address))
        ways: dict[str, Any] = {
            "plain": fixed_options,
            "transformers' prompt lookup": lambda limit: fixed_options(
                limit, prompt_lookup_num_tokens=NUM_DRAFT_TOKENS
            ),
            "drafter, same options": lambda limit: remote_options(
                limit, drafter=drafter, params=AS_TRANSFORMERS
            ),
            "drafter, n-grams 1 to 5": lambda limit: remote_options(
                limit, drafter=drafter, params=LONGER_NGRAMS
            ),
        }
        results = {
            name: decode_all(model, prompts, end_id, arguments.max_new_tokens, options)
            for name, options in ways.items()
        }

    print(f"{len(prompts)} held-out prompts, {results['plain'].num_tokens} output tokens, greedy")
    print(f"{'':<30}{'model steps':>12}{'tokens/step':>13}  output")
    is_same = True
    for name, result in results.items():
        equal = result.outputs == results["plain"].outputs
        is_same &= equal
        print(
            f"{name:<30}{result.num_steps:>12}{result.tokens_per_step:>13.2f}  "
            f"{'the same' if equal else 'NOT THE SAME'}"
        )
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
