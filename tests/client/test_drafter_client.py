"""Both clients of a drafter, and the stream, against a real drafter on loopback.

Each test runs once per client, the blocking one in threads.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from drafter.ngram.params import NgramParams as DrafterParams
from drafter.ngram.params import Overlap
from tandem.client import (
    AsyncDrafterClient,
    Draft,
    DrafterClient,
    DraftQuery,
    DraftSource,
    Keep,
    NgramParams,
    TandemError,
)
from tests.client.in_thread import InThread
from tests.client.late_drafter import late_drafter
from tests.client.served_drafter import ServedDrafter, served_drafter
from tests.drafter import brute_force


def blocking_client(target: str) -> InThread:
    return InThread(DrafterClient(target))


def streaming_client(target: str) -> AsyncDrafterClient:
    return AsyncDrafterClient(target, streaming=True)


@pytest.fixture(params=[blocking_client, AsyncDrafterClient, streaming_client])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[str], Any]]:
    """Makes a client, of each kind in turn; it is closed at the end of the test."""
    async with contextlib.AsyncExitStack() as stack:

        def make(target: str) -> Any:
            client = request.param(target)
            stack.push_async_callback(client.close)
            return client

        yield make


@pytest.fixture
async def drafter() -> AsyncIterator[ServedDrafter]:
    async with served_drafter() as served:
        yield served


def repeating_text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(4), k=length)


def expected(token_ids: Sequence[int], params: DrafterParams, max_draft_tokens: int) -> Draft:
    match = brute_force.propose(token_ids, params, max_draft_tokens)
    if match is None:
        return Draft()
    return Draft(
        token_ids=tuple(match[0]), matched_ngram_length=match[1], source=DraftSource.SEQUENCE
    )


async def test_growing_histories_get_the_drafts_that_brute_force_finds(
    drafter: ServedDrafter, connect: Any
) -> None:
    client = connect(drafter.address)
    params = NgramParams(min_ngram=1, max_ngram=4, overlap="allowed")
    oracle = DrafterParams(min_ngram=1, max_ngram=4, overlap=Overlap.ALLOWED)
    text = repeating_text(1, 120)
    first, second = client.open(params=params), client.open()
    for length in range(0, 120, 3):
        draft = await client.propose(first, text[:length], max_draft_tokens=5)
        assert draft == expected(text[:length], oracle, 5)
        other, same = await client.propose_batch(
            [
                DraftQuery(sequence=second, token_ids=text[length:], max_draft_tokens=3),
                DraftQuery(sequence=first, token_ids=text[:length], max_draft_tokens=2),
            ]
        )
        assert other == expected(text[length:], DrafterParams(), 3)
        assert same == expected(text[:length], oracle, 2)
    assert drafter.num_sequences == 2


async def test_another_drafter_at_the_same_address_gets_the_whole_history(connect: Any) -> None:
    async with served_drafter() as first:
        address = first.address
        client = connect(address)
        sequence, text = client.open(), repeating_text(3, 300)
        await client.propose(sequence, text, max_draft_tokens=5)
    with pytest.raises(TandemError) as error:
        await client.propose(sequence, text, max_draft_tokens=5)
    assert error.value.code is grpc.StatusCode.UNAVAILABLE
    async with served_drafter(listen=address):
        text += [0, 1]
        draft = None
        while draft is None:  # until the channel's backoff lets it connect
            with contextlib.suppress(TandemError):
                draft = await client.propose(sequence, text, max_draft_tokens=5)
        assert draft == expected(text, DrafterParams(), 5)


async def test_close_releases_every_sequence_and_may_be_called_twice(
    drafter: ServedDrafter, connect: Any
) -> None:
    client = connect(drafter.address)
    for _ in range(3):
        await client.propose(client.open(), [1, 2], max_draft_tokens=1)
    assert drafter.num_sequences == 3
    await client.close()
    assert drafter.num_sequences == 0
    await client.close()
    for call in (client.propose(client.open(), [1, 2], max_draft_tokens=1), client.load()):
        with pytest.raises(TandemError) as caught:
            await call
        assert caught.value.code is grpc.StatusCode.CANCELLED


async def test_a_released_sequence_is_forgotten_and_refused(
    drafter: ServedDrafter, connect: Any
) -> None:
    client = connect(drafter.address)
    kept, released = client.open(), client.open()
    for sequence in (kept, released):
        await client.propose(sequence, [1, 2], max_draft_tokens=1)
    await client.release(released)
    await client.release(released)
    assert drafter.num_sequences == 1
    with pytest.raises(ValueError, match="released"):
        await client.propose(released, [1, 2], max_draft_tokens=1)


async def test_a_released_text_may_be_kept_for_others_to_draft_from(
    drafter: ServedDrafter, connect: Any
) -> None:
    client = connect(drafter.address)
    params = NgramParams(pool_id="shared")
    first = client.open(params=params, prompt_length=2)
    await client.propose(first, [8, 9, *range(100, 120)], max_draft_tokens=0)
    await client.release(first, keep=Keep.OUTPUT, feed_id="once")
    drafter.drafter.pools.finish()  # pools are fed between batches
    second, stranger = client.open(params=params), client.open()
    draft = await client.propose(second, [7, 105, 106], max_draft_tokens=3)
    assert draft == Draft(
        token_ids=(107, 108, 109), matched_ngram_length=2, source=DraftSource.POOL
    )
    assert await client.propose(second, [7, 8, 9], max_draft_tokens=3) == Draft(), "the prompt"
    assert await client.propose(stranger, [7, 105, 106], max_draft_tokens=3) == Draft()


@pytest.mark.stand_in
async def test_a_late_answer_is_an_error_and_the_next_call_is_fine(connect: Any) -> None:
    async with late_drafter() as late:
        client = connect(late.address)
        sequence = client.open()
        with pytest.raises(TandemError) as error:
            await client.propose(sequence, [1, 2], max_draft_tokens=1, timeout_s=0.05)
        assert error.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        late.may_answer.set()
        await client.propose(sequence, [1, 2, 3], max_draft_tokens=1)
        assert late.model.known[sequence.sequence_id] == [1, 2, 3]


@pytest.mark.stand_in
@pytest.mark.parametrize("length", [2, 9_000])  # one message, and two
async def test_what_runs_when_a_client_is_closed_ends_with_an_error_of_its_own(
    connect: Any, length: int
) -> None:
    async with late_drafter() as late:
        client = connect(late.address)
        proposing = [
            asyncio.ensure_future(client.propose(client.open(), range(length), max_draft_tokens=1))
            for _ in range(2)
        ]
        await asyncio.sleep(0.2)
        await client.close()
        for error in await asyncio.gather(*proposing, return_exceptions=True):
            assert isinstance(error, TandemError)
            assert error.code is grpc.StatusCode.CANCELLED


async def test_a_cancelled_task_does_not_disturb_others_on_the_stream(
    drafter: ServedDrafter,
) -> None:
    async with AsyncDrafterClient(drafter.address, streaming=True) as client:
        sequence, text = client.open(), repeating_text(4, 50)
        for cancel_after in range(4):
            task = asyncio.create_task(
                client.propose(client.open(), repeating_text(5, 8000), max_draft_tokens=1)
            )
            for _ in range(cancel_after):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            draft = await client.propose(sequence, text, max_draft_tokens=5)
            assert draft == expected(text, DrafterParams(), 5)
