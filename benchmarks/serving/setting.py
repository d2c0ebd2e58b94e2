"""What the rows share: tasks, the running stack, workers of other processes. Started once each."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.client_load import run_tasks
from benchmarks.peers.protocol import Options, Request, converted_folder
from benchmarks.peers.worker_process import WorkerProcess, running_worker
from benchmarks.services import Service, Stack, running_process, running_stack
from benchmarks.serving.turns import Say, Variant
from benchmarks.workloads import Task, random_tasks, rename_tasks
from tandem.client import AsyncTandemClient, SpeculationParams, StructuredOutput, Usage

# With --pin: the model alone on the first core, everything else on the second.
PINNED = {"verifier": 0, "gateway": 1, "drafter": 1, "proxy": 1, "echo": 1}
_CLIENT_CORE = 1
_MODEL_CORE = 0
# How often services send their spans. It is 5 s by default: the next turn would pay for them.
EXPORT_INTERVAL_S = 0.2


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
    # Echoes per turn, and how often at most it puts on its load until there are hops enough.
    echoes: int
    most_hop_loads: int
    # Seconds of work that the paced verifier gets per turn.
    host_s: float
    # Seconds of arrivals per turn, and turns per load.
    load_s: float
    load_rounds: int


FULL = Amount(
    rounds=7,
    prompts=16,
    max_new_tokens=1024,
    random_tokens=128,
    random_rounds=60,
    narrow=0.01,
    echoes=300,
    most_hop_loads=20,
    host_s=4.0,
    load_s=10.0,
    load_rounds=3,
)
QUICK = Amount(
    rounds=2,
    prompts=2,
    max_new_tokens=24,
    random_tokens=8,
    random_rounds=2,
    narrow=1.0,
    echoes=5,
    most_hop_loads=1,
    host_s=0.1,
    load_s=0.1,
    load_rounds=2,
)


@dataclass(slots=True, kw_only=True)
class Setting:
    """One dtype on this machine. A stack, once started, runs until the end."""

    model: Path
    dtype: str
    threads: int
    # Numbers of streams to measure, of those that a row has.
    streams: Sequence[int]
    amount: Amount
    pins: bool
    # Environments and converted models of peers; logs.
    cache: Path
    say: Say
    # Stacks, clients and workers; closed by whoever made the setting.
    exits: contextlib.AsyncExitStack
    _running: dict[str, tuple[Stack, AsyncTandemClient]] = field(default_factory=dict)

    def chosen(self, goals: Mapping[int, float]) -> dict[int, float]:
        """A row's goals by number of streams, for the numbers that are measured."""
        return {streams: goal for streams, goal in goals.items() if streams in self.streams}

    async def stack(
        self,
        *,
        verifier_module: str = "verifier",
        num_verifiers: int = 1,
        serves_text: bool = True,
        delays_drafter: bool = False,
        spans_to: str = "",
    ) -> tuple[Stack, AsyncTandemClient]:
        """The services with so many of this verifier, and a client of theirs.

        Args:
            spans_to: the address of an OTLP receiver; "": no service makes spans.
        """
        key = f"{verifier_module}{' behind a proxy' if delays_drafter else ''}"
        if num_verifiers > 1:
            key += f", {num_verifiers} of it"
        if spans_to:
            key += " with spans"
        if key not in self._running:
            self.say(f"starts the services: {key}")
            stack = self.exits.enter_context(
                running_stack(
                    model=self.model,
                    verifier_module=verifier_module,
                    num_verifiers=num_verifiers,
                    verifier_flags=[
                        *("--dtype", self.dtype, "--threads", str(self.threads)),
                        *("--no-prefix-cache", "--allow-structured-output"),
                    ],
                    serves_text=serves_text,
                    delays_drafter=delays_drafter,
                    variables=_span_variables(spans_to) if spans_to else {},
                    cores=PINNED if self.pins else None,
                )
            )
            client = await self.exits.enter_async_context(
                AsyncTandemClient(stack.gateway, retry=None)
            )
            self._running[key] = stack, client
        return self._running[key]

    def service(self, module: str, name: str) -> Service:
        """Another service, for the rest of the run."""
        core = PINNED[name] if self.pins else None
        return self.exits.enter_context(running_process(module, core=core))

    def renames(self, streams: int) -> list[Task]:
        """The tasks of a turn."""
        count = max(self.amount.prompts, streams)
        return [
            Task(
                prompt_token_ids=task.prompt_token_ids,
                max_new_tokens=min(task.max_new_tokens, self.amount.max_new_tokens),
            )
            for task in rename_tasks(self.model, count)
        ]

    def random_texts(self, vocab_size: int, streams: int) -> list[Task]:
        """The tasks of a turn; several for one stream, so that a turn is not too short."""
        count = max(4, streams)
        return random_tasks(vocab_size, count, max_new_tokens=self.amount.random_tokens)

    def through_services(
        self,
        client: AsyncTandemClient,
        tasks: Sequence[Task],
        streams: int,
        *,
        speculate: bool,
        name: str = "services",
        structured_output: StructuredOutput | None = None,
        observe: Callable[[Sequence[Usage]], None] = lambda _: None,
    ) -> Variant:
        """The tasks through a gateway; tokens per second. `observe` gets each turn's usages."""

        async def turn() -> float:
            started_at_s = time.perf_counter()
            num_tokens, usages = await run_tasks(
                client, tasks, streams, SpeculationParams(enabled=speculate), structured_output
            )
            duration_s = time.perf_counter() - started_at_s
            observe(usages)
            return num_tokens / duration_s

        return Variant(name=name, streams=streams, turn=turn)

    def through_worker(
        self, worker: WorkerProcess, mode: str, tasks: Sequence[Task], streams: int, *, name: str
    ) -> Variant:
        """The tasks in a worker's process, which keeps the time; tokens per second."""
        requests = [
            Request(prompt=list(task.prompt_token_ids), max_new_tokens=task.max_new_tokens)
            for task in tasks
        ]

        async def turn() -> float:
            answers = await asyncio.to_thread(worker.ask, mode, requests, streams)
            return answers.tokens_per_s

        return Variant(name=name, streams=streams, turn=turn)

    @contextlib.contextmanager
    def worker(self, python: Path, module: str) -> Iterator[WorkerProcess]:
        """A peer's process; it shares the verifier's core where cores are given."""
        options = Options(
            model=self.model,
            converted=converted_folder(self.cache, self.model, self.dtype),
            dtype=self.dtype,
            threads=self.threads,
        )
        log = self.cache / "logs" / f"serving-{module}.log"
        with contextlib.ExitStack() as stack:
            with pinned(_MODEL_CORE if self.pins else None):
                worker = stack.enter_context(running_worker(python, module, options, log))
            yield worker


def _span_variables(receiver: str) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receiver}",
        "OTEL_BSP_SCHEDULE_DELAY": f"{EXPORT_INTERVAL_S * 1e3:.0f}",
    }


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """This process, and processes that it starts meanwhile, run on one core; None: anywhere."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def client_core(pins: bool) -> int | None:
    return _CLIENT_CORE if pins else None
