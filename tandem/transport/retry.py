"""When a request that failed is tried again, and at which gateway.

    failover = Failover(num_gateways, policy)       # one per client
    attempts = failover.begin(timeout_s)            # one per request
    gateway = attempts.next_gateway()               # before each of its calls

Owns the policy, the budget that the requests of one client share, and the count of one request's
failures. Knows neither channels nor messages; what a further call asks for is the business of
`tandem.continuation`.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from tandem.generation import TandemError
from tandem.transport.rotation import Rotation

# How calls end that a server lost or never ran. gRPC ends a call with CANCELLED that reaches a
# server just after its shutdown has begun; whoever cancels a call of theirs, or closes the client,
# does not ask for another one.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

# gRPC's words where keepalive ended the connection.
_PING_TIMEOUT = "ping timeout"

# More would overflow a float, whatever the policy.
_MAX_DOUBLINGS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and how soon, a client tries again after UNAVAILABLE or an overload.

    Only calls that failed with UNAVAILABLE are repeated, which a lost connection is too, those that
    a server that shuts down ended with CANCELLED, and those that were refused with
    RESOURCE_EXHAUSTED and the advice when to retry. A request that has output already is resumed
    behind it. All this happens within the caller's `timeout_s`.
    """

    max_attempts: int = 8
    """Calls in a row that bring nothing, the first included, before the error is raised."""
    max_resumes: int = 8
    """How often one request is resumed after output."""
    initial_backoff_s: float = 0.1
    """Upper bound of the random pause before the first repetition; doubles with each further."""
    max_backoff_s: float = 5.0
    """Maximum of that bound."""
    max_retry_after_s: float = 30.0
    """Longest pause that a server may ask for; one that asks for more is not called again."""
    budget: int = 500
    """Of the whole client: each failed call that brought nothing takes one, and below a half of it
    nothing is repeated, so that an outage is not multiplied."""
    budget_refill: float = 0.1
    """What each call that brings output gives back."""


class RetryBudget:
    """The token bucket of one client; threads may share it. As gRPC's retryThrottling."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._lock = threading.Lock()
        self._capacity = float(policy.budget)
        self._refill = policy.budget_refill
        self._left = self._capacity

    def take(self) -> bool:
        """Counts a failed call; returns whether it may be repeated."""
        with self._lock:
            self._left = max(0.0, self._left - 1)
            return self._left > self._capacity / 2

    def give_back(self, num_taken: int) -> None:
        """Counts a call that brought output; also returns what these failures took."""
        with self._lock:
            self._left = min(self._capacity, self._left + self._refill + num_taken)


class Failover:
    """What the requests of one client share; threads may share it."""

    def __init__(self, num_gateways: int, policy: RetryPolicy | None) -> None:
        """Begins with all gateways; None as the policy never tries again."""
        self._policy = policy
        self._budget = RetryBudget(policy) if policy else None
        self._rotation = Rotation(num_gateways)

    def begin(self, timeout_s: float | None) -> "Attempts":
        """A request that may take `timeout_s` in all; None is unlimited."""
        return Attempts(self._policy, self._budget, self._rotation, timeout_s)


class Attempts:
    """The calls of one request: where they go, how many failed, and how much time is left.

    Owned by whoever runs the request; it reports each call's first output, success and failure.
    """

    def __init__(
        self,
        policy: RetryPolicy | None,
        budget: RetryBudget | None,
        rotation: Rotation,
        timeout_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Begins before the first call.

        Args:
            policy: None never tries again.
            budget: the client's; None with a policy is unlimited.
            rotation: the client's.
            timeout_s: for all calls together; None is unlimited.
            clock: in seconds.
            jitter: a random number in [0, 1).
        """
        self._policy = policy
        self._budget = budget
        self._rotation = rotation
        self._clock = clock
        self._jitter = jitter
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._gateway = 0
        self._num_fruitless = 0
        self._num_resumes = 0
        self._has_output = False
        self._num_impatient = 0

        #: Whether the next call goes over a channel with the long keepalive. So do all calls after
        #: one that the short keepalive has ended: the link may be slow, and its gateway well.
        self.is_patient = False

    @property
    def time_left_s(self) -> float | None:
        """For the next call; None is unlimited."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - self._clock())

    def next_gateway(self) -> int:
        """Begins a call; returns the gateway that it goes to."""
        self._gateway = self._rotation.take()
        self._has_output = False
        return self._gateway

    def bring_output(self) -> None:
        """The current call has brought output."""
        if not self._has_output:
            self._has_output = True
            self._num_fruitless = 0
            if self._budget is not None:
                # The short keepalive ended those calls, and no server failed: each request over a
                # slow link would use up a retry.
                self._budget.give_back(self._num_impatient)
                self._num_impatient = 0

    def succeed(self) -> None:
        """The current call has ended well."""
        self.bring_output()
        self._rotation.succeeded(self._gateway)

    def fail(self, error: TandemError) -> float | None:
        """The current call has failed: seconds to wait before the next one, None to give up.

        A call that has brought output is followed by the next one almost at once.
        """
        policy, had_output = self._policy, self._has_output
        was_patient = self.is_patient
        self.is_patient |= error.code in _GONE and _PING_TIMEOUT in error.message
        if error.code in _GONE:
            self._rotation.failed(self._gateway)
        if policy is None or not _is_transient(error, had_output=had_output):
            return None
        doublings = min(self._num_fruitless, _MAX_DOUBLINGS)
        bound_s = min(policy.max_backoff_s, policy.initial_backoff_s * 2**doublings)
        backoff_s = self._jitter() * bound_s
        if had_output:
            self._num_resumes += 1
            if self._num_resumes > policy.max_resumes:
                return None
            pause_s = backoff_s
        else:
            self._num_fruitless += 1
            is_within_budget = self._budget is None or self._budget.take()
            self._num_impatient += self.is_patient and not was_patient
            if self._num_fruitless >= policy.max_attempts or not is_within_budget:
                return None
            retry_after_s = error.retry_after_s or 0.0
            if retry_after_s > policy.max_retry_after_s:
                return None
            pause_s = retry_after_s + backoff_s
        time_left_s = self.time_left_s
        return None if time_left_s is not None and pause_s >= time_left_s else pause_s


def _is_transient(error: TandemError, *, had_output: bool) -> bool:
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # Without advice, or in the middle of a stream, it is a limit of the request itself.
        return error.retry_after_s is not None and not had_output
    return error.code in _GONE
