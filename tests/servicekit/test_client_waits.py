"""Waits for clients: which of them end, with which error, and what cancels their end."""

import asyncio

import pytest

from servicekit.serving.client_waits import ClientWaits, is_left_unread


class UnreadError(Exception):
    pass


class DrainedError(Exception):
    pass


def waits_with(*, unread_timeout_s: float = 60.0) -> ClientWaits:
    return ClientWaits(unread_timeout_s=unread_timeout_s, make_unread_error=UnreadError)


async def enough_turns_for_a_wait_to_end() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_message_that_arrived_is_kept_though_its_wait_is_being_ended() -> None:
    waits = waits_with()
    async with waits.open() as call:
        call.begin_read()
        waits.end_reads(DrainedError)
        call.go_on()
        await enough_turns_for_a_wait_to_end()
    assert waits.all_closed.is_set()


async def wait_until_drained(waits: ClientWaits) -> None:
    async with waits.open() as call:
        call.begin_read()
        waits.end_reads(DrainedError)
        waits.end_reads(DrainedError)
        try:
            await asyncio.Event().wait()
        finally:
            assert not is_left_unread()


async def test_only_waits_for_the_next_message_end_when_reads_are_ended() -> None:
    waits = waits_with()
    async with waits.open() as working:
        with pytest.raises(DrainedError):
            await wait_until_drained(waits)
        assert len(waits) == 1
        working.begin_write()
        waits.end_reads(DrainedError)
        await enough_turns_for_a_wait_to_end()
    assert waits.all_closed.is_set()


async def test_a_message_that_is_not_accepted_in_time_ends_its_call_alone() -> None:
    waits = waits_with(unread_timeout_s=0.05)
    seen = []

    async def write_unread() -> None:
        async with waits.open() as call:
            call.begin_write()
            try:
                await asyncio.Event().wait()
            finally:
                seen.append(is_left_unread())

    async with waits.open() as reading:
        reading.begin_read()
        with pytest.raises(UnreadError):
            await asyncio.wait_for(write_unread(), 30)
        assert seen == [True]
        assert not is_left_unread()
        await enough_turns_for_a_wait_to_end()
    assert waits.all_closed.is_set()


async def test_a_process_that_was_suspended_takes_no_client_for_one_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    time_s = loop.time
    waits = waits_with(unread_timeout_s=60.0)
    async with waits.open() as call:
        call.begin_write()
        monkeypatch.setattr(loop, "time", lambda: time_s() + 3600.0)
        # The client has read, but the transport tells it only now.
        await enough_turns_for_a_wait_to_end()
        call.go_on()


async def test_a_timeout_of_the_call_itself_is_not_taken_for_an_end() -> None:
    with pytest.raises(TimeoutError):
        async with waits_with().open():
            raise TimeoutError
