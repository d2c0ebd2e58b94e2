"""The grammars that wait to be tried and compiled, and which one is next.

Knows no thread: whoever owns the jobs guards them.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from servicekit.shares import leaves_room
from verifier.structured.grammar import Grammar
from verifier.structured.grammar_state import GrammarState
from verifier.structured.trials import Verdict

MAX_WAITING = 1024


@dataclass(slots=True, eq=False)
class Job:
    """A grammar to compile for a sequence with this output.

    Attributes:
        verdict: what is known of it; None: nothing yet.
    """

    grammar: Grammar
    output_token_ids: Sequence[int]
    is_drafted: bool
    tenant: str
    priority: int
    future: "Future[GrammarState]" = field(default_factory=Future)
    arrived_at_s: float = field(default_factory=time.monotonic)
    verdict: Verdict | None = None


class _Turns:
    """The last turns of tenants."""

    def __init__(self) -> None:
        # Oldest first. Whoever is not among them had none of late.
        self._last: OrderedDict[str, int] = OrderedDict()
        self._num_turns = 0

    def last(self, tenant: str) -> int:
        return self._last.get(tenant, 0)

    def take(self, tenant: str) -> None:
        self._num_turns += 1
        self._last[tenant] = self._num_turns
        self._last.move_to_end(tenant)
        if len(self._last) > MAX_WAITING:
            self._last.popitem(last=False)


class WaitingJobs:
    """The jobs that wait. The highest priority is next; of it, the tenant whose last turn is
    longest ago, whatever others wait with; of this tenant, the oldest job.
    """

    def __init__(self) -> None:
        # Oldest first.
        self._jobs: OrderedDict[Future[GrammarState], Job] = OrderedDict()
        # Of compiling, and of being tried.
        self._turns = _Turns()
        self._tries = _Turns()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def has_tried(self) -> bool:
        """Whether there is a next job."""
        return any(job.verdict is not None for job in self._jobs.values())

    @property
    def highest_priority(self) -> int:
        """That of the next job; there must be one."""
        return max(job.priority for job in self._jobs.values() if job.verdict is not None)

    def has_room(self, tenant: str) -> bool:
        """Whether one more may wait. A tenant that has a name leaves room to others."""
        num_free = MAX_WAITING - len(self)
        held = sum(job.tenant == tenant for job in self._jobs.values()) if tenant else 0
        return num_free > 0 and leaves_room(held=held, added=1, num_free=num_free)

    def add(self, job: Job) -> None:
        self._jobs[job.future] = job

    def discard(self, future: "Future[GrammarState]") -> None:
        self._jobs.pop(future, None)

    def take_next(self) -> Job:
        """Removes and returns it; there must be one."""
        jobs = (job for job in self._jobs.values() if job.verdict is not None)
        job = min(jobs, key=lambda each: (-each.priority, self._turns.last(each.tenant)))
        del self._jobs[job.future]
        self._turns.take(job.tenant)
        return job

    def next_to_try(self, tried: Sequence[Grammar]) -> Job | None:
        """One of which nothing is known, and whose text is not tried just now; it stays here."""
        now = {each.source for each in tried}
        jobs = [
            job
            for job in self._jobs.values()
            if job.verdict is None and job.grammar.source not in now
        ]
        if not jobs:
            return None
        job = min(jobs, key=lambda each: (-each.priority, self._tries.last(each.tenant)))
        self._tries.take(job.tenant)
        return job

    def of_text(self, grammar: Grammar) -> list[Job]:
        """Those of which nothing is known, with the same grammar."""
        wanted = grammar.source
        return [
            job
            for job in self._jobs.values()
            if job.verdict is None and job.grammar.source == wanted
        ]

    def take_older(self, arrived_at_s: float) -> list[Job]:
        """Removes and returns the jobs that arrived before that."""
        taken = []
        while self._jobs and next(iter(self._jobs.values())).arrived_at_s < arrived_at_s:
            taken.append(self._jobs.popitem(last=False)[1])
        return taken
