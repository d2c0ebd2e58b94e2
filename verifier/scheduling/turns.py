"""Who is next among the waiting sequences: priority, then turns of tenants, then arrival.

Owns the waiting sequences, each tenant's own in order, and how much steps have computed for whom
while anybody waited or prompts of several tenants were computed. Of the tenants whose first
sequence has the highest priority, the one that was served least is next: virtual token counters
(Sheng et al., "Fairness in Serving Large Language Models", 2024). So while two tenants wait, what
they are served differs from their weights by what runs at a time at most, whether their requests
are long or short, and whatever either has queued. Who did not wait has little saved up; who was
served more than others pays it back.

Sequences with equal salts are a tenant's. With one tenant the order is priority, then arrival.

Knows no step and no block.
"""

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from verifier.scheduling.sequence import Sequence

# Tokens that each running sequence counts in advance: what it will have been served soon. Without,
# all places that come free in one step would go to one tenant.
_TOKENS_AHEAD = 64

# What a tenant may have been served less than others, and still be served more for, although it did
# not wait meanwhile: its sequences ran, and its queue was empty for a moment.
_MAX_SAVED_TOKENS = 1024

# Tenants without sequences that are remembered, because they were served more than others.
_MAX_ABSENT = 1024


@dataclass(slots=True, eq=False)
class _Tenant:
    """Attributes:
    waiting: in order.
    num_served_tokens: while anybody waited, divided by the weight; comparable between tenants.
    """

    weight: int = 1
    waiting: list[Sequence] = field(default_factory=list)
    num_waiting_tokens: int = 0
    num_running: int = 0
    num_served_tokens: float = 0.0

    @property
    def is_present(self) -> bool:
        return bool(self.waiting or self.num_running)

    @property
    def num_due_tokens(self) -> float:
        return self.num_served_tokens + self.num_running * _TOKENS_AHEAD / self.weight


def waiting_place(sequence: Sequence) -> tuple[int, int]:
    """A tenant's order in the queue: higher priority first, then earlier arrival."""
    return -sequence.priority, sequence.arrival


def place(sequence: Sequence) -> tuple[int, int, int]:
    """The order of running sequences: higher priority first, then earlier turns, then earlier
    arrival. Of one tenant they are all in one turn.
    """
    return -sequence.priority, sequence.turn, sequence.arrival


class Turns:
    """Owned by the engine thread.

    Invariants: a tenant is known while it has sequences, waiting or running, and `num_sequences`
    and `num_tokens` are those of the waiting ones.
    """

    def __init__(self) -> None:
        self.num_sequences = 0
        self.num_tokens = 0
        self._tenants: dict[str, _Tenant] = {}
        # What the least served waiting tenant had been served when a turn was last taken.
        self._turn_tokens = 0.0
        # The last turn, and whose it was.
        self._turn = 0
        self._last_salt = ""

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences, by tenant."""
        for tenant in self._tenants.values():
            yield from tenant.waiting

    @property
    def has_several(self) -> bool:
        """Whether there may be turns to take."""
        return len(self._tenants) > 1

    def wait(self, sequence: Sequence) -> None:
        """Adds a waiting sequence, at its place among its tenant's."""
        tenant = self._tenants.get(sequence.cache_salt)
        if tenant is None:
            if len(self._tenants) > _MAX_ABSENT:
                self._forget_absent()
            tenant = self._tenants[sequence.cache_salt] = _Tenant()
        tenant.weight = sequence.tenant_weight
        if not tenant.waiting:
            self._turn_tokens = least = self._least_served()
            if tenant.num_running:
                least -= _MAX_SAVED_TOKENS
            tenant.num_served_tokens = max(tenant.num_served_tokens, least)
        bisect.insort(tenant.waiting, sequence, key=waiting_place)
        tenant.num_waiting_tokens += sequence.num_held_tokens
        self.num_sequences += 1
        self.num_tokens += sequence.num_held_tokens

    def next_turn(self, sequence: Sequence) -> int:
        """The turn of a waiting sequence that starts now."""
        return self._turn + (sequence.cache_salt != self._last_salt)

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence, whose turn is set, runs."""
        self._turn_tokens = self._least_served()
        self.leave(sequence)
        self._turn, self._last_salt = sequence.turn, sequence.cache_salt
        self._tenants[sequence.cache_salt].num_running += 1

    def stop(self, sequence: Sequence) -> None:
        """A running sequence ends, or is about to wait again."""
        self._tenants[sequence.cache_salt].num_running -= 1

    def leave(self, sequence: Sequence) -> None:
        """A waiting sequence waits no longer."""
        tenant = self._tenants[sequence.cache_salt]
        tenant.waiting.remove(sequence)
        tenant.num_waiting_tokens -= sequence.num_held_tokens
        self.num_sequences -= 1
        self.num_tokens -= sequence.num_held_tokens

    def end(self, sequence: Sequence) -> None:
        """A sequence, which has stopped or left, will not wait again."""
        if not self.num_sequences and not any(each.num_running for each in self._tenants.values()):
            self._tenants.clear()
            self._turn_tokens = 0.0
            return
        tenant = self._tenants[sequence.cache_salt]
        if not tenant.is_present and tenant.num_served_tokens <= self._turn_tokens:
            del self._tenants[sequence.cache_salt]

    def is_within_share(
        self, salt: str, weight: int, num_tokens: int, *, max_sequences: int, max_tokens: int
    ) -> bool:
        """Whether a further sequence of a tenant is within its share of a queue of so many
        sequences and tokens, while others wait, too.
        """
        tenant = self._tenants.get(salt, _Tenant())
        others = sum(each.weight for each in self._tenants.values() if each.waiting)
        others -= tenant.weight if tenant.waiting else 0
        share = weight / (weight + others)
        return (
            others > 0
            and len(tenant.waiting) + 1 <= share * max_sequences
            and tenant.num_waiting_tokens + num_tokens <= share * max_tokens
        )

    def by_turns(self, prompts: SequenceOf[Sequence]) -> list[Sequence]:
        """Running prompts, which are in order, in the order of turns: of each priority, every
        tenant's first one, whoever was served least first, then its second, and so on.
        """
        num_before: dict[tuple[int, str], int] = {}
        keys: dict[Sequence, tuple[int, int, float]] = {}
        for sequence in prompts:
            whose = sequence.priority, sequence.cache_salt
            nth = num_before[whose] = num_before.get(whose, -1) + 1
            due = self._tenants[sequence.cache_salt].num_due_tokens
            keys[sequence] = -sequence.priority, nth, due
        return sorted(prompts, key=keys.__getitem__)

    def compete(self, prompts: SequenceOf[Sequence]) -> bool:
        """Whether what a step computes counts: somebody waits, or it had prompts of several
        tenants.
        """
        salts = {sequence.cache_salt for sequence in prompts} if len(prompts) > 1 else ()
        if len(salts) > 1:
            competing = [self._tenants[salt].num_served_tokens for salt in salts]
            self._turn_tokens = self._least_served(competing)
        return len(salts) > 1 or self.num_sequences > 0

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """A step computes so many tokens of a running sequence, while others compete."""
        tenant = self._tenants[sequence.cache_salt]
        tenant.num_served_tokens += num_tokens / tenant.weight

    def line(self) -> "Line":
        return Line(tenant for tenant in self._tenants.values() if tenant.waiting)

    def find_over_share(
        self,
        waiting: Sequence,
        running: SequenceOf[Sequence],
        *,
        room: int,
        size: Callable[[Sequence], int],
    ) -> Sequence | None:
        """The running sequence that makes way for a waiting one, whose tenant holds less than its
        share of a room: the last one of the tenant that holds most for its weight.

        Never the first running one, one of a higher priority, or of a tenant that would be left
        with less than its share, or has been served less. None: there is no other.

        Args:
            running: all of them, in order.
            room: all that there is of what sequences hold.
            size: how much of it a running sequence holds.
        """
        own = self._tenants[waiting.cache_salt]
        held = self._held(running, size)
        room_by_weight = room / sum(
            each.weight for each in self._tenants.values() if each.is_present
        )
        if held.get(own, 0) >= own.weight * room_by_weight:
            return None
        found: Sequence | None = None
        most = 0.0
        for sequence in reversed(running[1:]):
            tenant = self._tenants[sequence.cache_salt]
            if sequence.priority > waiting.priority:
                break
            if tenant is own or tenant.num_due_tokens < own.num_due_tokens:
                continue
            left = held[tenant] - size(sequence)
            if left >= tenant.weight * room_by_weight and held[tenant] / tenant.weight > most:
                found, most = sequence, held[tenant] / tenant.weight
        return found

    def find_largest(
        self, running: SequenceOf[Sequence], size: Callable[[Sequence], int]
    ) -> Sequence:
        """The last running sequence of the lowest priority, of the tenant that holds most for its
        weight, but not the first one, unless it is alone; the rest as for `find_over_share`.
        """
        held = self._held(running, size)
        lowest = running[-1].priority

        def held_by(sequence: Sequence) -> float:
            tenant = self._tenants[sequence.cache_salt]
            return held[tenant] / tenant.weight

        # The first of equals.
        last = reversed(running[1:] or running)
        return max((each for each in last if each.priority == lowest), key=held_by)

    def check_integrity(self, running: SequenceOf[Sequence]) -> None:
        """Asserts the invariants."""
        waiting = list(self)
        assert self.num_sequences == len(waiting)
        assert self.num_tokens == sum(each.num_held_tokens for each in waiting)
        for salt, tenant in self._tenants.items():
            own = [each for each in running if each.cache_salt == salt]
            assert tenant.num_running == len(own)
            assert tenant.waiting == sorted(tenant.waiting, key=waiting_place), "out of order"
            assert all(each.cache_salt == salt for each in tenant.waiting)
            assert tenant.num_waiting_tokens == sum(each.num_held_tokens for each in tenant.waiting)
        assert {each.cache_salt for each in running} <= self._tenants.keys()

    def _held(
        self, running: SequenceOf[Sequence], size: Callable[[Sequence], int]
    ) -> Mapping[_Tenant, int]:
        held: dict[_Tenant, int] = {}
        for sequence in running:
            tenant = self._tenants[sequence.cache_salt]
            held[tenant] = held.get(tenant, 0) + size(sequence)
        return held

    def _least_served(self, competing: Iterable[float] = ()) -> float:
        """What the least served of those that wait or compete has been served; never less than
        before.
        """
        waiting = (each.num_served_tokens for each in self._tenants.values() if each.waiting)
        return max(self._turn_tokens, min((*competing, *waiting), default=0.0))

    def _forget_absent(self) -> None:
        self._tenants = {
            salt: tenant for salt, tenant in self._tenants.items() if tenant.is_present
        }


class Line:
    """The waiting sequences in their order, while some of them start. Those that do not, but leave
    others to be next, are passed.
    """

    def __init__(self, tenants: Iterable[_Tenant]) -> None:
        self._next = [_First(tenant) for tenant in tenants]
        heapq.heapify(self._next)

    def first(self) -> Sequence | None:
        """The one that is next. None: all have started or were passed."""
        return self._next[0].sequence if self._next else None

    def go_on(self, *, has_started: bool) -> None:
        """The one that was next has started, or is passed."""
        first = self._next[0]
        first.num_passed += not has_started
        if first.num_passed < len(first.tenant.waiting):
            heapq.heapreplace(self._next, first)
        else:
            heapq.heappop(self._next)


@dataclass(slots=True)
class _First:
    """A tenant in a line: its first sequence that was not passed, of which it must have one."""

    tenant: _Tenant
    num_passed: int = 0

    @property
    def sequence(self) -> Sequence:
        return self.tenant.waiting[self.num_passed]

    def __lt__(self, other: "_First") -> bool:
        return self._place < other._place

    @property
    def _place(self) -> tuple[int, float, int]:
        sequence = self.sequence
        return -sequence.priority, self.tenant.num_due_tokens, sequence.arrival
