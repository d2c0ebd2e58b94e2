"""What the rows share: tasks, and the running services. Started once each."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.services import Service, running_stack
from benchmarks.turns import say
from benchmarks.workloads import Task, random_tasks, rename_tasks
from tandem.client import AsyncTandemClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much each row measures."""

    rounds: int
    # Renames per turn; one for each stream if there are more streams.
    prompts: int
    # Most output tokens of a rename.
    max_new_tokens: int
    # Output tokens of a random text.
    random_tokens: int
    # The most rounds of random text, and the half width of the interval that is narrow enough.
    random_rounds: int
    narrow: float
    # Seconds of arrivals per turn, and turns per load.
    load_s: float
    load_rounds: int
    # Of the stack with many.
    drafters: int


FULL = Amount(
    rounds=7,
    prompts=16,
    max_new_tokens=1024,
    random_tokens=128,
    random_rounds=60,
    narrow=0.01,
    load_s=10.0,
    load_rounds=3,
    drafters=16,
)
QUICK = Amount(
    rounds=1,
    prompts=2,
    max_new_tokens=24,
    random_tokens=8,
    random_rounds=1,
    narrow=1.0,
    load_s=0.1,
    load_rounds=1,
    drafters=2,
)


@dataclass(slots=True, kw_only=True)
class Setting:
    """One dtype on this machine. A stack, once started, runs until the end."""

    model: Path
    dtype: str
    threads: int
    # Numbers of streams to measure.
    streams: Sequence[int]
    amount: Amount
    # Stacks and clients; closed by whoever made the setting.
    exits: contextlib.AsyncExitStack
    _running: dict[tuple[int, int], tuple[Service, AsyncTandemClient]] = field(default_factory=dict)

    async def stack(
        self, *, num_verifiers: int = 1, num_drafters: int = 1
    ) -> tuple[Service, AsyncTandemClient]:
        """The gateway of so many services, and a client of it."""
        if (num_verifiers, num_drafters) not in self._running:
            say(f"starts the services, verifiers: {num_verifiers}, drafters: {num_drafters}")
            gateway = self.exits.enter_context(
                running_stack(
                    model=self.model,
                    num_verifiers=num_verifiers,
                    num_drafters=num_drafters,
                    verifier_flags=[
                        *("--dtype", self.dtype, "--threads", str(self.threads)),
                        "--no-prefix-cache",
                    ],
                )
            )
            client = await self.exits.enter_async_context(
                AsyncTandemClient(gateway.address, retry=None)
            )
            self._running[num_verifiers, num_drafters] = gateway, client
        return self._running[num_verifiers, num_drafters]

    def renames(self, streams: int) -> list[Task]:
        """The tasks of a turn."""
        most = self.amount.max_new_tokens
        return [
            replace(task, max_new_tokens=min(task.max_new_tokens, most))
            for task in rename_tasks(self.model, max(self.amount.prompts, streams))
        ]

    def random_texts(self, vocab_size: int, streams: int) -> list[Task]:
        """The tasks of a turn; several for one stream, so that a turn is not too short."""
        count = max(4, streams)
        return random_tasks(vocab_size, count, max_new_tokens=self.amount.random_tokens)
