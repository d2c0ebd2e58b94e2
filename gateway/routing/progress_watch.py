"""Whether each verifier makes progress with what it was given.

Owns that judgement alone. A verifier's connection may live while its engine is stuck: then nothing
comes any more, and nothing says so. A long queue is no such case, and neither are steps for other
gateways' sequences: as long as its engine steps, a verifier is alive, whoever it steps for.
"""

import asyncio

from gateway.peers.ignored_messages import IgnoredMessages
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.fleet import Fleet

# How often it is looked, within the timeout.
_LOOKS_PER_TIMEOUT = 4


class ProgressWatch:
    """Ends the session with a verifier that has sequences and no progress; on the event loop."""

    def __init__(
        self, *, fleet: Fleet, timeout_s: float, ignored_messages: IgnoredMessages
    ) -> None:
        """Prepares; `run` looks.

        Args:
            timeout_s: how long a verifier may have sequences, tell nothing of any and not step.
        """
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._ignored_messages = ignored_messages
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Looks again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._timeout_s / _LOOKS_PER_TIMEOUT)
            results = await asyncio.gather(
                *(self._look(verifier) for verifier in self._fleet.verifiers),
                return_exceptions=True,
            )
            for verifier, error in zip(self._fleet.verifiers, results, strict=True):
                if isinstance(error, Exception):
                    self._ignored_messages.record(
                        "verifier", verifier.name, "internal_error", repr(error)
                    )

    async def _look(self, verifier: VerifierLink) -> None:
        interval_s = self._timeout_s / _LOOKS_PER_TIMEOUT
        if not self._is_silent(verifier, interval_s):
            return
        has_stepped = await verifier.has_stepped(timeout_s=interval_s)
        # It may have spoken meanwhile.
        if not has_stepped and self._is_silent(verifier, self._timeout_s):
            verifier.give_up(f"no progress within {self._timeout_s:g} s")

    def _is_silent(self, verifier: VerifierLink, for_s: float) -> bool:
        return verifier.num_sequences > 0 and self._loop.time() - verifier.last_progress_s >= for_s
