"""Notices a verifier that does not answer, or whose engine does not step.

Owns that judgement, and polls the verifiers' loads for it and for the router. A frozen process
answers nothing; a stuck engine behind a living connection makes no step, although it has sequences.
A long queue is no such case: a verifier that steps, even for other gateways' sequences, is alive.
Nor is one whose sequences all wait for their grammars: its engine runs none.

Its sequences go on at another verifier, soon if there is one. Without one, ending them helps
nobody: then they wait for `progress_timeout_s`.
"""

import asyncio

from gateway.peers.verifier_link import VerifierLink
from gateway.routing.fleet import Fleet

_CHECKS_PER_TIMEOUT = 6
# A verifier that has sent nothing for so many intervals is polled.
_SILENT_INTERVALS = 2
# A step may take so many times as long as is expected of it. What is expected may be too long for a
# while, after a freeze made one step long.
_STEP_TOLERANCE = 2.0
# Of a verifier that has made no step yet.
_FIRST_STEP_TIMEOUT_S = 10.0


class ProgressWatch:
    """Checks all verifiers of a fleet; on the event loop."""

    def __init__(
        self, *, fleet: Fleet, failover_after_s: float, progress_timeout_s: float, can_wait: bool
    ) -> None:
        """Prepares; `run` checks.

        Args:
            failover_after_s: how long a verifier may not answer, or not step, until its sequences
                move to another one.
            progress_timeout_s: the same, if there is no other.
            can_wait: whether engines wait without bound for drafts, so that they need not step.
        """
        self._fleet = fleet
        self._failover_after_s = failover_after_s
        self._progress_timeout_s = progress_timeout_s
        self._can_wait = can_wait
        self._interval_s = min(failover_after_s, progress_timeout_s) / _CHECKS_PER_TIMEOUT
        self._loop = asyncio.get_running_loop()
        self._polls: dict[VerifierLink, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Checks at intervals, until cancelled."""
        try:
            while True:
                due_s = self._loop.time() + self._interval_s
                await asyncio.sleep(self._interval_s)
                late_s = self._loop.time() - due_s
                for verifier in self._fleet.verifiers:
                    if late_s > self._interval_s:
                        # This process stood still; the verifiers may have not.
                        verifier.load.excuse(late_s)
                    if verifier.welcome is not None:
                        self._check(verifier)
        finally:
            for poll in self._polls.values():
                poll.cancel()
            await asyncio.gather(*self._polls.values(), return_exceptions=True)

    def _check(self, verifier: VerifierLink) -> None:
        load = verifier.load
        now_s = self._loop.time()
        silent_s = now_s - load.last_answer_s
        stuck_s = now_s - load.last_progress_s
        # Sequences that came after a stall began have not waited since then.
        waited_s = now_s - max(load.last_progress_s, load.begun_s)
        max_step_s, may_be_silent_s = self._max_step_s(verifier), self._failover_after_s
        if verifier.is_draining:
            # It answers no polls: its keepalive and its drain's end show that it is gone.
            max_step_s = may_be_silent_s = self._progress_timeout_s
        is_silent = silent_s >= may_be_silent_s
        load.is_unresponsive = is_silent or stuck_s >= max_step_s
        if not verifier.num_sequences or not load.is_unresponsive:
            pass
        elif self._fleet.has_alternative(verifier):
            if is_silent:
                verifier.give_up(f"no answer within {may_be_silent_s:g} s")
            elif waited_s >= max_step_s:
                verifier.give_up(f"no step for {stuck_s:.1f} s")
        elif max(silent_s, waited_s) >= self._progress_timeout_s:
            verifier.give_up(f"no progress within {self._progress_timeout_s:g} s")
        if silent_s >= _SILENT_INTERVALS * self._interval_s and verifier not in self._polls:
            poll = asyncio.ensure_future(verifier.poll(timeout_s=self._failover_after_s))
            self._polls[verifier] = poll
            poll.add_done_callback(lambda poll: self._end_poll(verifier, poll))

    def _max_step_s(self, verifier: VerifierLink) -> float:
        if self._can_wait:
            return self._progress_timeout_s
        expected_s = verifier.load.expected_step_s
        tolerated_s = _STEP_TOLERANCE * expected_s if expected_s else _FIRST_STEP_TIMEOUT_S
        return min(max(self._failover_after_s, tolerated_s), self._progress_timeout_s)

    def _end_poll(self, verifier: VerifierLink, poll: "asyncio.Task[None]") -> None:
        del self._polls[verifier]
        if not poll.cancelled() and (error := poll.exception()) is not None:
            verifier.ignored.record("internal_error", repr(error))
