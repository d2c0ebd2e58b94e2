"""Gateways that are killed or stopped while they stream: their clients go on through another.

All services are processes; both clients are used, the blocking one in threads.
"""

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.client import (
    AsyncTandemClient,
    Chunk,
    Event,
    Generation,
    GenerationRequest,
    SamplingParams,
    SpeculationParams,
    Started,
    TandemClient,
    Usage,
)
from tandem.generation import EventCollector
from tests.client.in_thread import InThread
from tests.integration.processes import Service, gateway, verifier_with_drafter
from tests.integration.prompts import rename_prompts
from tests.volume import cases

PROMPT = "".join(f"<|code|>total_{each} = price + tax" for each in range(20))
# Bytes that are whole characters only together, and letters.
BYTES_OF_CHARACTERS = dict.fromkeys((163, 251, 230, 132, 107, 69, 73), 100.0)
# Long, and with short drafts, so that no stream ends before its gateway does.
GREEDY = GenerationRequest(
    prompt=rename_prompts(1)[0],
    max_new_tokens=500,
    ignore_eos=True,
    speculation=SpeculationParams(num_speculative_tokens=1),
)
REQUESTS = {
    "greedy": GREEDY,
    "seeded": dataclasses.replace(GREEDY, sampling=SamplingParams(temperature=1.0, seed=5)),
    "three choices": dataclasses.replace(
        GREEDY, n=3, sampling=SamplingParams(temperature=1.0, seed=2**64 - 1)
    ),
    "logprobs": dataclasses.replace(
        GREEDY, sampling=SamplingParams(temperature=0.7, logprobs=2, prompt_logprobs=1)
    ),
    "characters of several tokens": dataclasses.replace(
        GREEDY,
        prompt=PROMPT,
        sampling=SamplingParams(temperature=8.0, logit_bias=BYTES_OF_CHARACTERS),
    ),
}
# All are sampled; greedy requests are resumed after a drain, below.
SEVERAL_PROPERTIES = ("three choices", "logprobs", "characters of several tokens")


@pytest.fixture(scope="module")
def servers() -> Iterator["Servers"]:
    with Servers() as servers:
        yield servers


class Servers:
    """One verifier with its drafter, and two gateways that serve."""

    def __init__(self) -> None:
        self._exits = contextlib.ExitStack()
        self._gateways: list[Service] = []
        self._flags: tuple[str, ...] = ()

    def __enter__(self) -> "Servers":
        self._verifier, self._drafter = self._exits.enter_context(verifier_with_drafter())
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def gateways(self, *flags: str) -> list[Service]:
        """Two; those that have ended, or have other flags, are replaced."""
        if flags != self._flags:
            self._flags, self._gateways = flags, []
        self._gateways = [each for each in self._gateways if each.process.poll() is None]
        while len(self._gateways) < 2:
            started = self._exits.enter_context(gateway(self._verifier, self._drafter, *flags))
            self._gateways.append(started)
        return self._gateways

    def signal_busy_gateway(self, number: int, *, until_it_ends: bool = False) -> Service:
        """Sends a signal to the gateway that runs requests.

        The verifier stands still meanwhile, so that no stream ends before its gateway.
        """
        self._verifier.process.send_signal(signal.SIGSTOP)
        try:
            [busy] = [each for each in self._gateways if each.metric("tandem_num_requests_running")]
            busy.process.send_signal(number)
            if until_it_ends:
                busy.process.wait()
        finally:
            self._verifier.process.send_signal(signal.SIGCONT)
        return busy


def blocking_client(*arguments: Any, **options: Any) -> InThread:
    return InThread(TandemClient(*arguments, **options))


def generation_of(events: list[Event]) -> Generation:
    """The result; asserts that there is one start and that no token is missing or repeated."""
    assert [index for index, event in enumerate(events) if isinstance(event, Started)] == [0]
    collector = EventCollector()
    num_tokens: dict[int, int] = {}
    for event in events:
        collector.add(event)
        if isinstance(event, Chunk):
            assert event.offset == num_tokens.get(event.choice_index, 0)
            num_tokens[event.choice_index] = event.offset + len(event.token_ids)
    return collector.generation()


def outputs(generation: Generation) -> list[object]:
    """What may not differ: all but the cost."""
    return [dataclasses.replace(choice, usage=Usage()) for choice in generation.choices]


@pytest.mark.parametrize(
    ("connect", "name"),
    [
        *((AsyncTandemClient, name) for name in cases(SEVERAL_PROPERTIES, REQUESTS)),
        *((blocking_client, name) for name in cases(SEVERAL_PROPERTIES[:1], REQUESTS)),
    ],
)
async def test_killing_the_gateway_of_a_stream_changes_nothing_in_it(
    servers: Servers, connect: Any, name: str
) -> None:
    request = REQUESTS[name]
    addresses = [each.address for each in await asyncio.to_thread(servers.gateways)]
    async with connect(addresses) as client, asyncio.timeout(100):
        # Without a seed in the request, the first run's is used in the second one.
        undisturbed = await client.generate(request)
        request = dataclasses.replace(
            request, sampling=dataclasses.replace(request.sampling, seed=undisturbed.seed)
        )
        if name == "characters of several tokens":
            text = undisturbed.text
            assert len(text.encode()) > len(text)
            # The first text that is not seen before, some way behind the cut.
            end = next(
                end for end in range(300, len(text)) if text.find(text[end - 6 : end]) == end - 6
            )
            request = dataclasses.replace(request, stop_sequences=[text[end - 6 : end]])
            undisturbed = await client.generate(request)
            assert undisturbed.text == text[: end - 6]
        events: list[Event] = []
        awaited = set(range(request.n or 1))
        async for event in client.stream(request):
            events.append(event)
            if awaited and isinstance(event, Chunk) and event.offset > 1:
                awaited.discard(event.choice_index)
                if not awaited:
                    killed = await asyncio.to_thread(servers.signal_busy_gateway, signal.SIGKILL)
    resumed = generation_of(events)
    assert await asyncio.to_thread(killed.process.wait) == -signal.SIGKILL
    assert outputs(resumed) == outputs(undisturbed)
    assert {choice.usage.resumes for choice in resumed.choices} == {1}
    assert all(choice.usage.output_tokens == len(choice.token_ids) for choice in resumed.choices)


@pytest.mark.parametrize("connect", [AsyncTandemClient, blocking_client])
async def test_a_gateway_that_is_stopped_finishes_its_streams_and_gets_no_more(
    servers: Servers, connect: Any
) -> None:
    """On one channel: the stream goes on at one address while new calls go to the other."""
    addresses = [each.address for each in await asyncio.to_thread(servers.gateways)]
    async with connect(f"ipv4:{','.join(addresses)}") as client, asyncio.timeout(100):
        undisturbed = await client.generate(GREEDY)
        events: list[Event] = []
        async for event in client.stream(GREEDY):
            events.append(event)
            if len(events) == 4:
                stopped = await asyncio.to_thread(servers.signal_busy_gateway, signal.SIGTERM)
                short = dataclasses.replace(GREEDY, max_new_tokens=5)
                for _ in range(5):
                    generation = await client.generate(short)
                    assert generation.token_ids == undisturbed.token_ids[:5]
        assert outputs(generation_of(events)) == outputs(undisturbed)
        assert generation_of(events).usage.resumes == 0
        assert await asyncio.to_thread(stopped.process.wait) == 0


async def test_a_stream_that_outlives_its_gateways_drain_is_resumed(servers: Servers) -> None:
    short_drain = ("--drain-timeout-s", "0.05")
    addresses = [each.address for each in await asyncio.to_thread(servers.gateways, *short_drain)]
    async with AsyncTandemClient(addresses) as client, asyncio.timeout(100):
        undisturbed = await client.generate(GREEDY)
        events: list[Event] = []
        async for event in client.stream(GREEDY):
            events.append(event)
            if len(events) == 4:
                await asyncio.to_thread(
                    servers.signal_busy_gateway, signal.SIGTERM, until_it_ends=True
                )
    assert outputs(generation_of(events)) == outputs(undisturbed)
    assert generation_of(events).usage.resumes == 1
