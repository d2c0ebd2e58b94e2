"""A running Tandem for a Prometheus to scrape: one process per service, on loopback.

For tests, and for the pictures in the docs. Unlike `tandem up`, it knows the metrics' addresses.
"""

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workloads import BUNDLED_MODEL, Task
from tandem.channel import TlsOptions
from tandem.client import AsyncTandemClient, Finished, GenerationRequest, SamplingParams
from tandem.free_ports import free_port
from tandem.ready_line import parse_ready_line

REPOSITORY = Path(__file__).resolve().parents[2]
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A process and its addresses."""

    process: "subprocess.Popen[str]"
    address: str
    metrics_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTandem:
    """The three services."""

    drafter: Service
    verifier: Service
    gateway: Service

    def targets(self) -> dict[str, list[str]]:
        """The metrics' addresses by job name of `prometheus.yml`."""
        return {
            "tandem-drafter": [self.drafter.metrics_address],
            "tandem-verifier": [self.verifier.metrics_address],
            "tandem-gateway": [self.gateway.metrics_address],
        }


@contextlib.contextmanager
def live_tandem(flags: Mapping[str, Sequence[str]] | None = None) -> Iterator[LiveTandem]:
    """Starts the services with the bundled model; stops them on exit.

    Args:
        flags: further flags, by service.

    Raises:
        RuntimeError: a service ended before it was ready; stderr says why.
    """
    flags = flags or {}
    model = str(BUNDLED_MODEL)
    with contextlib.ExitStack() as stack:

        def start(name: str, *own: str) -> Service:
            return stack.enter_context(_running(name, *own, *flags.get(name, ())))

        drafter = start("drafter")
        drafters = ("--drafters", drafter.address)
        verifier = start("verifier", "--model", model, "--threads", "1", *drafters)
        gateway = start(
            "gateway",
            *("--tokenizer", model, "--http-listen", "127.0.0.1:0", *drafters),
            *("--verifiers", verifier.address),
        )
        yield LiveTandem(drafter=drafter, verifier=verifier, gateway=gateway)


async def generate(
    address: str, tasks: Sequence[Task], *, streams: int, tls: TlsOptions | None = None
) -> list[Finished]:
    """Runs all tasks, `streams` at a time; returns how each ended."""
    room = asyncio.Semaphore(streams)
    async with AsyncTandemClient(address, tls=tls) as client:

        async def run(task: Task) -> list[Finished]:
            async with room:
                return [end async for end in _ends(client, task)]

        ends = await asyncio.gather(*(run(task) for task in tasks))
    return list(itertools.chain.from_iterable(ends))


async def _ends(client: AsyncTandemClient, task: Task) -> AsyncIterator[Finished]:
    request = GenerationRequest(
        prompt=list(task.prompt_token_ids),
        max_new_tokens=task.max_new_tokens,
        sampling=SamplingParams(temperature=task.temperature),
    )
    async with contextlib.aclosing(client.stream(request)) as events:
        async for event in events:
            if isinstance(event, Finished):
                yield event


@contextlib.contextmanager
def _running(name: str, *flags: str) -> Iterator[Service]:
    metrics_address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", name, "--listen", "127.0.0.1:0"),
            *("--metrics-listen", metrics_address, "--log-level", "warning", *flags),
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        addresses = parse_ready_line(process.stdout.readline())
        if addresses is None:
            raise RuntimeError(f"the {name} ended before it was ready ({process.wait()})")
        yield Service(process=process, address=addresses["grpc"], metrics_address=metrics_address)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
