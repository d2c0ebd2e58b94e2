"""Streams that are cut and resumed, against the same streams uncut. No server, no clock."""

import dataclasses
import itertools
from collections.abc import Iterable

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.requests import seeds as gateway_seeds
from tandem.client import (
    Chunk,
    Event,
    Finished,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    Started,
    TandemError,
    TokenLogprob,
    Usage,
)
from tandem.continuation import Continuation, seed_of_choice
from tandem.generation import EventCollector
from tests.client.scripted_gateway import ScriptedGateway

PROMPT = [5, 6, 7, 8, 9]
REQUESTS = {
    "stop token": GenerationRequest(prompt=PROMPT, max_new_tokens=1000),
    "length": GenerationRequest(prompt=PROMPT, max_new_tokens=11),
    "one token": GenerationRequest(prompt=PROMPT, max_new_tokens=1),
    "stop string": GenerationRequest(
        prompt=PROMPT, max_new_tokens=1000, stop_sequences=["end", "☃𝄞"]
    ),
    "held back to the end": GenerationRequest(
        prompt=PROMPT, max_new_tokens=1000, stop_sequences=["endless"]
    ),
    "logprobs": GenerationRequest(
        prompt=PROMPT,
        max_new_tokens=1000,
        sampling=SamplingParams(seed=2**64 - 1, logprobs=2, prompt_logprobs=1),
    ),
    "choices": GenerationRequest(
        prompt=PROMPT,
        max_new_tokens=1000,
        n=3,
        stop_sequences=["en"],
        sampling=SamplingParams(seed=3, logprobs=0, prompt_logprobs=0),
    ),
    "given output": GenerationRequest(
        prompt=PROMPT, max_new_tokens=1000, output_token_ids=[1, 2], n=2
    ),
    "reported tokens": GenerationRequest(
        prompt=PROMPT, max_new_tokens=1000, stop_sequences=["endless"], report_tokens=True, n=2
    ),
}


def run(request: GenerationRequest, cuts: Iterable[int] = ()) -> list[Event]:
    """What the caller gets when each call in turn is cut before an event, and the last is not."""
    gateway, continuation = ScriptedGateway(), Continuation(request)
    cut = iter(cuts)
    shown: list[Event] = []
    while (wanted := continuation.next_call()) is not None:
        events = gateway.stream(wanted)
        end = next(cut, len(events))
        for event in events[:end]:
            if (passed := continuation.receive(event)) is not None:
                shown.append(passed)
        if end < len(events):
            shown += continuation.interrupt()
        else:
            continuation.end()
    return shown


def generation_of(events: list[Event]) -> Generation:
    """The result of a stream that a caller may get: one start, no gap, nothing after an end."""
    assert isinstance(events[0], Started)
    num_tokens: dict[int, int] = {}
    over: set[int] = set()
    collector = EventCollector()
    for event in events:
        collector.add(event)
        if isinstance(event, Chunk | Finished):
            assert event.choice_index not in over
        if isinstance(event, Chunk):
            assert event.offset == num_tokens.get(event.choice_index, event.offset)
            num_tokens[event.choice_index] = event.offset + len(event.token_ids)
        elif isinstance(event, Finished):
            over.add(event.choice_index)
    assert sum(isinstance(event, Started) for event in events) == 1
    return collector.generation()


def without_resumes(generation: Generation) -> Generation:
    """Without what a call that was cut does not tell: it is told by Finished only."""
    return dataclasses.replace(
        generation,
        choices=tuple(
            dataclasses.replace(
                choice, usage=dataclasses.replace(choice.usage, resumes=0, by_match_length=())
            )
            for choice in generation.choices
        ),
    )


@given(
    name=st.sampled_from(sorted(REQUESTS)),
    seed=st.integers(0, 2**64 - 1),
    cuts=st.lists(st.integers(0, 12), max_size=8),
)
def test_a_stream_cut_again_and_again_gives_the_same_result(
    name: str, seed: int, cuts: list[int]
) -> None:
    request = REQUESTS[name]
    request = dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, seed=seed)
    )
    uncut, resumed = generation_of(run(request)), generation_of(run(request, cuts))
    assert without_resumes(resumed) == without_resumes(uncut)


def test_resumes_are_counted_and_repetitions_without_output_are_not() -> None:
    request = REQUESTS["stop token"]
    assert generation_of(run(request, [0, 1])).usage.resumes == 0
    assert generation_of(run(request, [3, 0, 1])).usage.resumes == 1
    assert generation_of(run(request, [3, 2, 2])).usage.resumes == 3
    last = len(run(request)) - 1
    assert generation_of(run(request, [last])).usage.resumes == 0, "there was nothing to resume"
    # One that was resumed may end like that, too.
    assert generation_of(run(request, [3, last - 2])).usage.resumes == 1


def test_a_resumed_call_asks_for_the_rest_of_one_choice() -> None:
    request, continuation = REQUESTS["choices"], Continuation(REQUESTS["choices"])
    for event in itertools.takewhile(
        lambda event: not isinstance(event, Finished), ScriptedGateway().stream(request)
    ):
        continuation.receive(event)
    continuation.interrupt()
    wanted = continuation.next_call()
    assert wanted is not None
    assert wanted.n == 1
    assert wanted.sampling.seed == 3
    assert wanted.sampling.prompt_logprobs is None
    assert wanted.output_token_ids
    assert wanted.request_id == "made"


def chunk(offset: int, *token_ids: int, choice_index: int = 0) -> Chunk:
    return Chunk(
        choice_index=choice_index,
        offset=offset,
        token_ids=token_ids,
        text="",
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_steps=1,
    )


FINISHED = Finished(choice_index=0, finish_reason=FinishReason.STOP, usage=Usage())


@pytest.mark.parametrize(
    "events",
    [
        [chunk(1, 7)],
        [chunk(0, 7), chunk(0, 7)],
        [chunk(0, 7), chunk(2, 8)],
        [chunk(0, 7, choice_index=1)],
        [chunk(0, 7), FINISHED, chunk(1, 8)],
        [FINISHED, FINISHED],
        [Started(request_id="r", seed=1, num_prompt_tokens=6)],
    ],
)
def test_a_server_that_repeats_or_skips_tokens_is_an_error(events: list[Event]) -> None:
    continuation = Continuation(GenerationRequest(prompt=PROMPT))
    continuation.receive(Started(request_id="r", seed=1, num_prompt_tokens=5))
    for event in events[:-1]:
        continuation.receive(event)
    with pytest.raises(TandemError) as caught:
        continuation.receive(events[-1])
    assert caught.value.code is grpc.StatusCode.INTERNAL


def test_logprobs_of_a_prompt_that_the_caller_has_are_not_repeated() -> None:
    """Also where the resumed call joins what came in several chunks."""
    entries = tuple(TokenLogprob(token_id=each, logprob=-1.0, rank=1) for each in range(5))
    request = GenerationRequest(prompt=PROMPT, sampling=SamplingParams(prompt_logprobs=0))
    continuation = Continuation(request)
    started = Started(request_id="r", seed=1, num_prompt_tokens=5)
    continuation.receive(started)
    continuation.receive(dataclasses.replace(chunk(0), prompt_logprobs=entries[:3]))
    continuation.interrupt()
    wanted = continuation.next_call()
    assert wanted is not None
    assert wanted.sampling.prompt_logprobs == 0
    assert continuation.receive(started) is None
    assert continuation.receive(dataclasses.replace(chunk(0), prompt_logprobs=entries[:2])) is None
    joined = dataclasses.replace(chunk(0, 9), prompt_logprobs=entries[2:])
    assert continuation.receive(joined) == dataclasses.replace(joined, prompt_logprobs=entries[3:])


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 15))
def test_a_choice_alone_has_the_seed_that_the_gateway_gave_it(seed: int, index: int) -> None:
    assert seed_of_choice(seed, index) == gateway_seeds.seed_of_choice(seed, index)
