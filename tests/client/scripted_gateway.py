"""What a gateway streams for a request, without any server: the oracle of resumed requests.

Tokens are a function of the seed and the position. Text, chunks and usage are made by the gateway's
own code. Every step is a chunk, and steps end at the same positions in every call.
"""

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from gateway.api import wire as gateway_wire
from gateway.generation.generation import Generation
from gateway.messages.response import Chunk, Finished, GenerateEvent, Model, Started
from gateway.messages.verifier import PromptScored
from gateway.requests.seeds import seed_of_choice
from gateway.text.output.output_text import OutputText
from gateway.text.tokenizer import Tokenizer
from tandem import wire
from tandem.client import Event, GenerationRequest
from tandem.values import FinishReason, SamplingParams
from tests.gateway.factories import append_step, encoded_logprob, make_request

TOKENIZER = Tokenizer.load(
    Path(__file__).parents[2] / "examples" / "demo_model" / "model",
)
STOP_TOKEN = TOKENIZER.encode("q")[0]
# Characters of one to four bytes; each byte is a token where there is no word with it.
_CHARACTERS = "aé☃𝄞 \nen"
_NUM_CHARACTERS = 12
_MODEL = Model(
    model_id="model",
    model_digest="",
    vocab_size=1 << 18,
    max_model_len=1 << 18,
    max_num_speculative_tokens=7,
    num_verifiers=1,
)


class ScriptedGateway:
    """Seeds of requests without one differ from call to call, as a gateway's do."""

    def __init__(self) -> None:
        self._seeds = itertools.count(1000)

    def stream(self, request: GenerationRequest) -> list[Event]:
        """All events of one call."""
        events = map(gateway_wire.event_to_proto, self._stream(request))
        return [event for each in events if (event := wire.to_event(each)) is not None]

    def _stream(self, request: GenerationRequest) -> Iterator[GenerateEvent]:
        seed = request.sampling.seed
        seed = next(self._seeds) if seed is None else seed
        assert not isinstance(request.prompt, str)
        yield Started(
            request_id=request.request_id or "made",
            seed=seed,
            model=_MODEL,
            prompt_token_ids=list(request.prompt),
        )
        choices = [_choice(request, seed, index) for index in range(request.n or 1)]
        while choices:
            for generation in list(choices):
                _append_next_step(generation)
                generation.publish()
                while (event := generation.read()) is not None:
                    assert isinstance(event, Chunk)
                    yield from _apart(event)
                if generation.is_over:
                    choices.remove(generation)
                    assert generation.finish_reason is not None
                    yield Finished(
                        choice_index=generation.choice_index,
                        finish_reason=generation.finish_reason,
                        usage=generation.usage(),
                    )


def _choice(request: GenerationRequest, seed: int, index: int) -> Generation:
    accepted = make_request(
        list(request.prompt),  # type: ignore[arg-type]
        output_token_ids=list(request.output_token_ids),
        max_new_tokens=request.max_new_tokens,
        stop_sequences=list(request.stop_sequences),
        sampling=SamplingParams(
            logprobs=request.sampling.logprobs, prompt_logprobs=request.sampling.prompt_logprobs
        ),
        report_tokens=request.report_tokens,
    )
    assert len(accepted.output_token_ids) < accepted.max_new_tokens, "a gateway refuses it"
    text = OutputText(
        TOKENIZER.detokenizer(accepted.prompt_token_ids),
        accepted.stop_sequences,
        reports_tokens=accepted.report_tokens,
    )
    text.skip(accepted.output_token_ids)
    assert not text.stopped, "a gateway refuses it"
    generation = Generation(
        request=accepted,
        sequence_id="sequence",
        choice_index=index,
        seed=seed_of_choice(seed, index),
        output_text=text,
        changed=asyncio.Event(),
    )
    if generation.sampling.prompt_logprobs is not None:
        logprobs = [encoded_logprob(token_id) for token_id in accepted.prompt_token_ids[1:]]
        generation.append_prompt_logprobs(
            PromptScored(sequence_id="sequence", base_length=1, logprobs=logprobs)
        )
    return generation


def _append_next_step(generation: Generation) -> None:
    """The tokens up to the next position where a step ends."""
    output = _output(generation.seed)
    num_known = len(generation.token_ids) - generation.prompt_length
    end = num_known + 1
    while (generation.seed + end) % 3 and end < generation.request.max_new_tokens:
        end += 1
    token_ids = output[num_known:end]
    finish: FinishReason | None = None
    if end == generation.request.max_new_tokens:
        finish = FinishReason.LENGTH
    if STOP_TOKEN in token_ids:
        token_ids = token_ids[: token_ids.index(STOP_TOKEN) + 1]
        finish = FinishReason.STOP
    has_logprobs = generation.request.sampling.logprobs is not None
    append_step(
        generation,
        token_ids,
        drafts=min(len(token_ids), 3),
        accepted=min(len(token_ids), 3) - 1,
        finish=finish,
        logprobs=[encoded_logprob(each) for each in token_ids] if has_logprobs else (),
    )


def _output(seed: int) -> list[int]:
    """The tokens that would follow without any end."""
    chosen = random.Random(seed)
    text = "".join(chosen.choice(_CHARACTERS) for _ in range(_NUM_CHARACTERS))
    return [*TOKENIZER.encode(text), *TOKENIZER.encode("end"), STOP_TOKEN]


def _apart(chunk: Chunk) -> Iterator[Chunk]:
    """Logprobs of the prompt in chunks of their own, as those of a long prompt come."""
    scored = chunk.prompt_logprobs
    for first in range(0, len(scored), 2):
        yield dataclasses.replace(
            chunk,
            token_ids=(),
            text="",
            num_draft_tokens=0,
            num_accepted_tokens=0,
            num_steps=0,
            logprobs=(),
            prompt_logprobs=scored[first : first + 2],
            finish_reason=None,
            steps=(),
        )
    yield dataclasses.replace(chunk, prompt_logprobs=())
