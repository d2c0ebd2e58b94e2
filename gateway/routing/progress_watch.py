"""Ends the session of a verifier that has sequences and makes no progress.

Owns that judgement. A verifier's connection may live while its engine is stuck: then no message
comes any more. A long queue is no such case: a verifier whose engine steps, even for other
gateways' sequences, is alive.
"""

import asyncio

from gateway.peers.verifier_link import VerifierLink
from gateway.routing.fleet import Fleet

_CHECKS_PER_TIMEOUT = 4


class ProgressWatch:
    """Checks all verifiers of a fleet; on the event loop."""

    def __init__(self, *, fleet: Fleet, timeout_s: float) -> None:
        """Prepares; `run` checks.

        Args:
            timeout_s: how long a verifier with sequences may send nothing and make no step.
        """
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / _CHECKS_PER_TIMEOUT
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Checks at intervals, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            results = await asyncio.gather(
                *(self._check(verifier) for verifier in self._fleet.verifiers),
                return_exceptions=True,
            )
            for verifier, error in zip(self._fleet.verifiers, results, strict=True):
                if isinstance(error, Exception):
                    verifier.ignored.record("internal_error", repr(error))

    async def _check(self, verifier: VerifierLink) -> None:
        if not self._is_silent(verifier, self._interval_s):
            return
        has_stepped = await verifier.has_stepped(timeout_s=self._interval_s)
        # A message may have come meanwhile.
        if not has_stepped and self._is_silent(verifier, self._timeout_s):
            verifier.give_up(f"no progress within {self._timeout_s:g} s")

    def _is_silent(self, verifier: VerifierLink, for_s: float) -> bool:
        return verifier.num_sequences > 0 and self._loop.time() - verifier.last_progress_s >= for_s
