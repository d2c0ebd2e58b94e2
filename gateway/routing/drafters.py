"""The drafters, as the verifiers report them.

Owns which drafters there are, what each connected verifier last reported of each, and which one a
sequence gets. Verifiers talk to drafters themselves: the gateway names one in each Open, of those
that its own configuration leads to. Knows no sequence.
"""

from collections.abc import Sequence

from gateway.messages.verifier import DrafterState
from gateway.routing import router

_UNABLE = (DrafterState.SLOW, DrafterState.DOWN, DrafterState.REFUSED)

# Drafters that are gone, and whose states verifiers may still report.
_MAX_GONE = 1024


class Drafters:
    """All drafters, by address; on the event loop.

    Attributes:
        addresses: those that sequences get.
    """

    def __init__(self) -> None:
        """Begins without any."""
        self.addresses: Sequence[str] = ()
        # Oldest first.
        self._gone: dict[str, None] = {}
        # By verifier and drafter. One without a report counts as able to draft.
        self._states: dict[str, dict[str, DrafterState]] = {}

    @property
    def num_up(self) -> int:
        """How many drafters answer at least one verifier."""
        return len(
            {
                address
                for states in self._states.values()
                for address, state in states.items()
                if state is DrafterState.UP and address in self.addresses
            }
        )

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """These drafters are there now; others get no more sequences."""
        for address in set(self.addresses).difference(addresses):
            self._gone[address] = None
        for address in addresses:
            self._gone.pop(address, None)
        self.addresses = tuple(addresses)
        while len(self._gone) > _MAX_GONE:
            forgotten = next(iter(self._gone))
            del self._gone[forgotten]
            for states in self._states.values():
                states.pop(forgotten, None)

    def knows(self, address: str) -> bool:
        """Whether the drafter is there, or was."""
        return address in self.addresses or address in self._gone

    def set_state(self, verifier: str, address: str, state: DrafterState) -> bool:
        """A verifier reports the state of a drafter that is known. Returns whether that is news.

        What it refused it refuses until its session ends.
        """
        states = self._states.setdefault(verifier, {})
        if states.get(address) in (state, DrafterState.REFUSED):
            return False
        states[address] = state
        return True

    def forget(self, verifier: str) -> None:
        """The verifier's session has ended: nothing is known."""
        self._states.pop(verifier, None)

    def has_unable(self, verifier: str) -> bool:
        """Whether any drafter does not draft for this verifier."""
        return any(state in _UNABLE for state in self._states.get(verifier, {}).values())

    def choose(self, verifier: str, key: str) -> str:
        """The drafter of a new sequence; "" if there is none.

        If no drafter is able to draft, the sequence gets drafts when its own one is again.
        """
        states = self._states.get(verifier, {})
        return router.choose_drafter(key, self._able(verifier)) or router.choose_drafter(
            key, [each for each in self.addresses if states.get(each) is not DrafterState.REFUSED]
        )

    def choose_instead(self, verifier: str, key: str, address: str) -> str:
        """The drafter that a sequence moves to; "" if it stays: its own is able, or none is."""
        able = self._able(verifier)
        return "" if address in able else router.choose_drafter(key, able)

    def _able(self, verifier: str) -> Sequence[str]:
        states = self._states.get(verifier, {})
        return [each for each in self.addresses if states.get(each) not in _UNABLE]
