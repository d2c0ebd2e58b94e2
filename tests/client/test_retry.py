"""When requests are tried again and at which gateway; on a clock that the test sets."""

import grpc
import pytest

from tandem.generation import TandemError
from tandem.transport.retry import Attempts, RetryBudget, RetryPolicy
from tandem.transport.rotation import Rotation

GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
UNAVAILABLE = TandemError(grpc.StatusCode.UNAVAILABLE, "gone")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def attempts(
    *,
    timeout_s: float | None = None,
    budget: RetryBudget | None = None,
    clock: Clock | None = None,
    jitter: float = 1.0,
    policy: RetryPolicy | None = RetryPolicy(),  # noqa: B008 - immutable
) -> Attempts:
    return Attempts(
        policy,
        budget,
        Rotation(1),
        timeout_s,
        clock=clock or Clock(),
        jitter=lambda: jitter,
    )


def failures(of: Attempts, count: int, *, output: bool = False) -> list[float | None]:
    """The pauses after so many calls that failed, each after output or not."""
    pauses = []
    for _ in range(count):
        of.next_gateway()
        if output:
            of.bring_output()
        pauses.append(of.fail(UNAVAILABLE))
    return pauses


def test_pauses_double_up_to_their_maximum_and_end_with_the_last_attempt() -> None:
    policy = RetryPolicy(max_attempts=6, initial_backoff_s=1.0, max_backoff_s=5.0)
    assert failures(attempts(policy=policy), 6) == [1.0, 2.0, 4.0, 5.0, 5.0, None]
    assert failures(attempts(policy=policy, jitter=0.5), 2) == [0.5, 1.0]
    many = RetryPolicy(max_attempts=2000, max_backoff_s=5.0)
    assert failures(attempts(policy=many), 1999)[-1] == 5.0


def test_output_ends_a_row_of_failures_and_is_resumed_so_many_times() -> None:
    policy = RetryPolicy(max_attempts=2, max_resumes=2, initial_backoff_s=1.0)
    request = attempts(policy=policy)
    assert failures(request, 1) == [1.0]
    assert failures(request, 1, output=True) == [1.0]
    assert failures(request, 1) == [1.0]
    assert failures(request, 2, output=True) == [1.0, None]


def test_an_overloaded_server_says_when_to_call_it_again() -> None:
    def pause(retry_after_s: float | None, *, output: bool = False) -> float | None:
        request = attempts(policy=RetryPolicy(initial_backoff_s=1.0, max_retry_after_s=7.0))
        request.next_gateway()
        if output:
            request.bring_output()
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        return request.fail(TandemError(code, "full", retry_after_s=retry_after_s))

    assert pause(7.0) == 8.0
    assert pause(7.5) is None
    assert pause(None) is None
    assert pause(1.0, output=True) is None


@pytest.mark.parametrize("code", [each for each in grpc.StatusCode if each not in GONE])
def test_no_other_failure_is_repeated(code: grpc.StatusCode) -> None:
    request = attempts()
    request.next_gateway()
    assert request.fail(TandemError(code, "no")) is None


def test_no_pause_goes_beyond_the_deadline() -> None:
    clock = Clock()
    request = attempts(
        policy=RetryPolicy(initial_backoff_s=2.0, max_attempts=9), timeout_s=5.0, clock=clock
    )
    assert request.time_left_s == 5.0
    assert failures(request, 1) == [2.0]
    clock.now_s += 1.5
    assert request.time_left_s == 3.5
    assert failures(request, 1) == [None]
    clock.now_s += 100
    assert request.time_left_s == 0.0


def test_an_outage_uses_up_the_budget_and_successes_bring_it_back() -> None:
    policy = RetryPolicy(budget=8, budget_refill=1.0)
    budget = RetryBudget(policy)
    # Each of these is a request of its own.
    repeated = [failures(attempts(budget=budget), 1) != [None] for _ in range(6)]
    assert repeated == [True, True, True, False, False, False]
    for _ in range(4):
        attempts(budget=budget).succeed()
    assert failures(attempts(budget=budget), 1) != [None]


def test_streams_that_are_cut_after_output_cost_no_budget() -> None:
    """Else a gateway with more streams than the budget could not be replaced by another."""
    budget = RetryBudget(RetryPolicy(budget=2, budget_refill=0.0))
    assert None not in [failures(attempts(budget=budget), 1, output=True)[0] for _ in range(100)]
    assert failures(attempts(budget=budget), 1) == [None]


def test_a_gateway_that_failed_is_left_out_for_growing_pauses() -> None:
    clock = Clock()
    rotation = Rotation(3, clock=clock)
    for pause_s in (1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        for _ in range(50):  # as many streams end with one gateway
            rotation.failed(1)
        clock.now_s += pause_s - 0.1
        assert {rotation.take() for _ in range(6)} == {0, 2}
        clock.now_s += 0.2
        assert {rotation.take() for _ in range(3)} == {0, 1, 2}
    rotation.succeeded(1)
    rotation.failed(1)
    clock.now_s += 1.1
    assert 1 in {rotation.take() for _ in range(3)}


def test_when_all_are_left_out_the_one_that_waited_longest_is_tried() -> None:
    clock = Clock()
    rotation = Rotation(2, clock=clock)
    rotation.failed(1)
    clock.now_s += 0.5
    rotation.failed(0)
    assert rotation.take() == 1
