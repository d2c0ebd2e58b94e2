"""What a verifier's messages say of its load; drills show what comes of it."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from gateway.peers.verifier_load import VerifierLoad
from gateway.routing.progress_watch import ProgressWatch


def told(load: VerifierLoad, step_id: int, *, num_tokens: int = 8, step_s: float = 0.01) -> None:
    load.step(step_id=step_id, num_tokens=num_tokens, num_sequences=3, num_own=3, step_s=step_s)


def polled(load: VerifierLoad, num_steps: int) -> None:
    load.report(num_running=3, num_waiting=0, num_own=3, num_steps=num_steps, step_s=0.01)


def test_a_poll_that_finds_the_step_after_the_last_one_told_finds_no_progress() -> None:
    """Otherwise a stall would seem to begin at the first poll, and be noticed so much later."""
    load = VerifierLoad()
    load.connect(1.0, "one")
    load.answer(2.0)
    told(load, 100)
    for now_s in (2.5, 3.0, 3.5):
        load.answer(now_s)
        polled(load, 101)
        assert load.last_progress_s == 2.0
    # Steps of which only others are told.
    for now_s, num_steps in ((4.0, 102), (4.5, 103)):
        load.answer(now_s)
        polled(load, num_steps)
        assert load.last_progress_s == now_s
    load.connect(5.0, "another process")
    load.answer(6.0)
    polled(load, 1)
    assert load.last_progress_s == 6.0


def test_an_engine_whose_sequences_wait_for_their_grammars_is_not_stuck() -> None:
    load = VerifierLoad()
    load.connect(1.0, "one")
    load.begin(2.0)
    for now_s, num_running, num_waiting, is_progress in (
        (3.0, 0, 1, True),
        # Another gateway's waits, too.
        (4.0, 0, 2, True),
        # It runs one, and makes no step.
        (5.0, 1, 1, False),
        # It does not know of this gateway's.
        (6.0, 0, 0, False),
    ):
        load.last_progress_s = 2.0
        load.answer(now_s)
        load.report(
            num_running=num_running, num_waiting=num_waiting, num_own=1, num_steps=0, step_s=0.0
        )
        assert load.last_progress_s == (now_s if is_progress else 2.0)


def test_short_steps_between_do_not_make_a_long_prompt_suspect() -> None:
    load = VerifierLoad()
    load.connect(1.0, "one")
    told(load, 1, num_tokens=512, step_s=1.4)
    for step_id in range(2, 10_000):
        told(load, step_id)
    assert load.longest_step_s == 1.4
    # But prompts that are faster now, after what made the machine slow for a while, do.
    for step_id in range(10_000, 20_000):
        told(load, step_id, num_tokens=500, step_s=0.2)
    assert load.longest_step_s < 0.21


def test_a_prompt_lets_expect_a_step_in_proportion_to_its_tokens() -> None:
    load = VerifierLoad()
    load.connect(1.0, "one", max_step_tokens=512)
    load.prompts["a"] = 100
    assert load.expected_step_s == 0.0, "no step is known"
    told(load, 1, num_tokens=10, step_s=0.1)
    assert load.expected_step_s == pytest.approx(1.0)
    load.prompts["b"] = 1_000_000
    assert load.expected_step_s == pytest.approx(5.12)
    told(load, 2, num_tokens=512, step_s=0.6)
    assert load.expected_step_s == 0.6, "one as large is known"
    load.prompts.clear()
    assert load.expected_step_s == 0.6
    # A slow moment of a small step does not make large ones expect more than that.
    told(load, 3, num_tokens=5, step_s=1.0)
    load.prompts["c"] = 1_000_000
    assert load.expected_step_s == 1.0


@pytest.mark.parametrize("is_draining", [True, False])
async def test_a_verifier_that_drains_may_be_silent_for_longer(is_draining: bool) -> None:
    """It answers no polls, and tells of no step in which no sequence of this gateway has output."""
    reasons: list[str] = []
    load = VerifierLoad()
    fleet: Any = SimpleNamespace(has_alternative=lambda _: True)
    verifier = MagicMock(
        load=load,
        num_sequences=1,
        give_up=reasons.append,
        is_draining=is_draining,
        poll=lambda timeout_s: asyncio.sleep(0),
    )
    watch = ProgressWatch(
        fleet=fleet, failover_after_s=1.5, progress_timeout_s=120.0, can_wait=False
    )
    now_s = asyncio.get_running_loop().time()
    load.connect(now_s, "one")
    told(load, 1, num_tokens=512, step_s=0.1)
    load.begun_s = load.last_progress_s = load.last_answer_s = now_s - 3
    watch._check(verifier)
    assert reasons == ([] if is_draining else ["no answer within 1.5 s"])
    load.begun_s = load.last_progress_s = load.last_answer_s = now_s - 130
    watch._check(verifier)
    assert reasons[-1] == f"no answer within {120 if is_draining else 1.5:g} s"


async def test_no_verifier_is_blamed_for_the_time_that_this_process_stood_still() -> None:
    reasons: list[str] = []
    now_s = 0.0
    load = VerifierLoad()
    load.connect(now_s, "one")
    verifier: Any = MagicMock(
        load=load,
        num_sequences=1,
        give_up=reasons.append,
        is_draining=False,
        poll=lambda timeout_s: asyncio.sleep(0),
    )
    fleet: Any = SimpleNamespace(has_alternative=lambda _: True, verifiers=[verifier])
    watch = ProgressWatch(
        fleet=fleet, failover_after_s=0.06, progress_timeout_s=120.0, can_wait=False
    )
    is_checked = asyncio.Event()
    check = watch._check

    def checked(verifier: Any) -> None:
        check(verifier)
        is_checked.set()

    watch._loop, watch._check = MagicMock(time=lambda: now_s), checked  # type: ignore[method-assign]
    running = asyncio.ensure_future(watch.run())
    await asyncio.sleep(0)
    now_s = 1000.0
    await asyncio.wait_for(is_checked.wait(), 60)
    running.cancel()
    assert reasons == []


def test_a_stall_does_not_make_the_next_one_tolerable() -> None:
    load = VerifierLoad()
    load.connect(1.0, "one")
    load.answer(2.0)
    load.step(step_id=6, num_tokens=4, num_sequences=3, num_own=1, step_s=0.01)
    assert (load.longest_step_s, load.num_others, load.last_progress_s) == (0.01, 2, 2.0)
    load.is_unresponsive = True
    load.step(step_id=7, num_tokens=4, num_sequences=3, num_own=1, step_s=9.0)
    assert load.longest_step_s == 0.01
    # The mean of its steps after a stall.
    load.report(num_running=3, num_waiting=2, num_own=1, num_steps=7, step_s=4.0)
    assert (load.longest_step_s, load.num_others, load.num_waiting) == (0.01, 4, 2)
