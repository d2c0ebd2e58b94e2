"""The drafters, as the verifiers report them.

Owns which drafters there are, what each connected verifier last reported of each, and which one its
sequences get. Verifiers talk to drafters themselves: the gateway names one in each Open, of those
that its own configuration leads to. Knows no sequence.
"""

from collections import Counter
from collections.abc import Sequence

from gateway.messages.verifier import DrafterState
from gateway.routing import router

_UNABLE = (DrafterState.SLOW, DrafterState.DOWN, DrafterState.REFUSED)

# Drafters that are gone, and whose states verifiers may still report.
_MAX_GONE = 1024
# As many as a verifier uses: states that it may report of drafters that are not found yet.
_MAX_NOT_FOUND = 256


class Drafters:
    """All drafters, by address; on the event loop.

    Attributes:
        addresses: those that sequences get.
    """

    def __init__(self) -> None:
        """Begins without any."""
        self.addresses: Sequence[str] = ()
        self._there: frozenset[str] = frozenset()
        # Oldest first.
        self._gone: dict[str, None] = {}
        # By verifier and drafter. One without a report counts as able to draft.
        self._states: dict[str, dict[str, DrafterState]] = {}
        # By verifier: what `choose` returns, until something changes.
        self._chosen: dict[str, str] = {}
        # How many verifiers each drafter answers.
        self._num_answered: Counter[str] = Counter()

    @property
    def num_up(self) -> int:
        """How many drafters answer at least one verifier."""
        return sum(self._num_answered[address] > 0 for address in self.addresses)

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """These drafters are there now; others get no more sequences."""
        for address in set(self.addresses).difference(addresses):
            self._gone[address] = None
        for address in addresses:
            self._gone.pop(address, None)
        self._chosen.clear()
        self.addresses = tuple(addresses)
        self._there = frozenset(addresses)
        while len(self._gone) > _MAX_GONE:
            forgotten = next(iter(self._gone))
            del self._gone[forgotten]
            self._num_answered.pop(forgotten, None)
            for states in self._states.values():
                states.pop(forgotten, None)

    def may_report(self, verifier: str, address: str) -> bool:
        """Whether what a verifier reports of this drafter is kept: if it is there or was, and of
        some others, which may be found later than verifiers connect to them.
        """
        if address in self._there or address in self._gone:
            return True
        states = self._states.get(verifier, {})
        num_found = len(self.addresses) + len(self._gone)
        return address in states or len(states) < num_found + _MAX_NOT_FOUND

    def set_state(self, verifier: str, address: str, state: DrafterState) -> bool:
        """A verifier reports the state of a drafter, as it may. Returns whether that is news.

        What it refused it refuses until its session ends.
        """
        states = self._states.setdefault(verifier, {})
        before = states.get(address)
        if before in (state, DrafterState.REFUSED):
            return False
        states[address] = state
        self._chosen.pop(verifier, None)
        self._count_answered(address, (state is DrafterState.UP) - (before is DrafterState.UP))
        return True

    def forget(self, verifier: str) -> None:
        """The verifier's session has ended: nothing is known."""
        self._chosen.pop(verifier, None)
        for address, state in self._states.pop(verifier, {}).items():
            self._count_answered(address, -(state is DrafterState.UP))

    def _count_answered(self, address: str, more: int) -> None:
        """Counts verifiers that the drafter answers, or no longer; keeps no zeros."""
        if count := self._num_answered[address] + more:
            self._num_answered[address] = count
        else:
            self._num_answered.pop(address, None)

    def has_unable(self, verifier: str) -> bool:
        """Whether any drafter does not draft for this verifier, of those that are or were there."""
        return any(
            state in _UNABLE and (address in self._there or address in self._gone)
            for address, state in self._states.get(verifier, {}).items()
        )

    def choose(self, verifier: str) -> str:
        """The drafter of the verifier's new sequences; "" if there is none.

        If no drafter is able to draft, they get drafts when their own one is again.
        """
        chosen = self._chosen.get(verifier)
        if chosen is None:
            states = self._states.get(verifier, {})
            candidates = self._able(verifier) or [
                each for each in self.addresses if states.get(each) is not DrafterState.REFUSED
            ]
            chosen = self._chosen[verifier] = router.choose_drafter(verifier, candidates)
        return chosen

    def choose_instead(self, verifier: str, address: str) -> str:
        """The drafter that a sequence moves to; "" if it stays: its own is able, or none is."""
        able = self._able(verifier)
        return "" if address in able else router.choose_drafter(verifier, able)

    def _able(self, verifier: str) -> Sequence[str]:
        states = self._states.get(verifier, {})
        return [each for each in self.addresses if states.get(each) not in _UNABLE]
