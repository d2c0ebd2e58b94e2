"""Requests, generations and messages, for tests of single modules."""

import asyncio
from collections.abc import Sequence
from typing import Any

from gateway.generation.generation import Generation
from gateway.messages.request import AcceptedRequest
from gateway.messages.response import Chunk, EncodedLogprob
from gateway.messages.verifier import Decided, OpenCommand
from gateway.text.output.output_text import OutputText
from gateway.text.tokenizer import Tokenizer
from tandem.v1 import sampling_pb2
from tandem.values import DraftWait, FinishReason, NgramParams, SamplingParams


def make_request(prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> AcceptedRequest:
    return AcceptedRequest(
        **{
            "request_id": "request",
            "model_id": "model",
            "model_digest": "digest",
            "prompt_token_ids": list(prompt),
            "output_token_ids": (),
            "sampling": SamplingParams(),
            "seed": 7,
            "max_new_tokens": 1000,
            "stop_sequences": (),
            "stop_token_ids": (),
            "ignore_eos": False,
            "num_choices": 1,
            "num_speculative_tokens": 7,
            "ngram": NgramParams(min_ngram=2, max_ngram=5),
            "vocab_size": 1 << 18,
            "affinity_key": "",
            "hint_tokens": 512,
            **fields,
        }
    )


def make_generation(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    sequence_id: str = "sequence",
    tokenizer: Tokenizer | None = None,
    **fields: Any,
) -> Generation:
    request = make_request(prompt, **fields)
    output_text = OutputText(
        None if tokenizer is None else tokenizer.detokenizer(),
        request.stop_sequences,
        reports_tokens=request.report_tokens,
    )
    output_text.feed(request.output_token_ids)
    return Generation(
        request=request,
        sequence_id=sequence_id,
        choice_index=0,
        seed=7,
        output_text=output_text,
        changed=asyncio.Event(),
    )


def make_open(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    sequence_id: str = "sequence",
    seed: int = 7,
    draft_wait: DraftWait = DraftWait.ADAPTIVE,
    drafter: str = "drafter:50051",
    **fields: Any,
) -> OpenCommand:
    request = make_request(prompt, **fields)
    return OpenCommand(
        sequence_id=sequence_id,
        token_ids=[*request.prompt_token_ids, *request.output_token_ids],
        request=request,
        sampling=request.sampling,
        seed=seed,
        num_speculative_tokens=request.num_speculative_tokens,
        draft_wait=draft_wait,
        drafter=drafter,
    )


def encoded_logprob(token_id: int, *, num_tops: int = 0) -> EncodedLogprob:
    """A token's logprob, as large as it can be."""
    return sampling_pb2.TokenLogprob(
        token_id=token_id,
        logprob=-0.5,
        rank=2,
        top=[
            sampling_pb2.TokenLogprob(token_id=(1 << 32) - 1, logprob=-1.5, rank=(1 << 32) - 1)
            for _ in range(num_tops)
        ],
    ).SerializeToString()


def read_chunk(generation: Generation) -> Chunk | None:
    """The next chunk of a generation without traces."""
    event = generation.read()
    assert event is None or isinstance(event, Chunk)
    return event


def append_step(
    generation: Generation,
    token_ids: Sequence[int],
    *,
    drafts: int = 0,
    accepted: int = 0,
    finish: FinishReason | None = None,
    logprobs: Sequence[EncodedLogprob] = (),
) -> None:
    """One verifier step for a generation."""
    base_length = len(generation.token_ids)
    generation.append(
        Decided("sequence", base_length, list(token_ids), drafts, accepted, finish, logprobs)
    )
