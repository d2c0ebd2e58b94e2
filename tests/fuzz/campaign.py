"""A campaign: many concurrent calls, a bystander, and a check of what remains.

Owns the order of a campaign and its measurements: the bystander's tokens, health, memory, logs, and
that no state remains.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.workloads import BUNDLED_MODEL, rename_tasks
from tandem.client import AsyncTandemClient, GenerationRequest, SamplingParams, TandemError
from tandem.v1 import verifier_pb2, verifier_pb2_grpc
from tests.drills.fleet import Member
from tests.fuzz.calls import BOUND_S, Call, Caller, Method, find_methods

#: Most that a process may grow by after the first `WARM_UP` of the inputs: what the bounds in
#: `services.py` let it hold is reached by then, and the rest is the allocators'.
MAX_GROWTH_BYTES = 96 << 20
WARM_UP = 0.25

# Statuses that no call may end with. The services count them, including calls whose status did not
# reach the client.
_UNCLEAN = ("UNKNOWN", "INTERNAL", "DATA_LOSS", "ABORTED", "DEADLINE_EXCEEDED", "UNAVAILABLE")

# A campaign stops after this many failures.
_MOST_FAILURES = 20
_HEALTH_INTERVAL_S = 1.0


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a campaign.

    Attributes:
        num_inputs: messages sent.
        statuses: calls by method and status.
        num_inputs_by_method: messages by method.
        failures: the errors found, for people to read.
        growth_bytes: by service, since the warm-up.
        num_bystander_requests: requests of the bystander that got their tokens.
        longest_bystander_s: its longest wait.
    """

    num_inputs: int = 0
    duration_s: float = 0.0
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_inputs_by_method: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    growth_bytes: dict[str, int] = field(default_factory=dict)
    num_bystander_requests: int = 0
    longest_bystander_s: float = 0.0


async def run_campaign(
    services: Sequence[Member],
    *,
    num_inputs: int,
    seed: int,
    num_at_once: int = 24,
    first_call: int = 0,
) -> Report:
    """Sends `num_inputs` inputs to the services, and checks the effects.

    Args:
        services: running, without other clients.
        num_inputs: messages in all.
        seed: of all inputs.
        num_at_once: calls at a time.
        first_call: the number of the first call; with the seed it determines the inputs.
    """
    report = Report()
    methods = find_methods(services)
    weights = [_weight(method) for method in methods]
    caller = Caller(services)
    started_at_s = time.perf_counter()
    numbers = iter(range(first_call, first_call + num_inputs * 100))
    at_warm_up: dict[str, int] = {}

    async def work() -> None:
        for number in numbers:
            if report.num_inputs >= num_inputs or len(report.failures) >= _MOST_FAILURES:
                return
            draw = random.Random(f"{seed}-{number}-method")
            (method,) = draw.choices(methods, weights)
            _record(report, await caller.make(method, number, seed))
            if not at_warm_up and report.num_inputs >= WARM_UP * num_inputs:
                at_warm_up.update(_resident_bytes(services))

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(caller.close)
        await stack.enter_async_context(_bystander(services, report))
        await stack.enter_async_context(_watcher(services, report))
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(num_at_once, num_inputs)):
                workers.create_task(work())
    report.duration_s = time.perf_counter() - started_at_s
    await _check_idle(services, report)
    for name, resident in _resident_bytes(services).items():
        report.growth_bytes[name] = resident - at_warm_up.get(name, resident)
        if report.growth_bytes[name] > MAX_GROWTH_BYTES:
            report.failures.append(f"{name} grew by {report.growth_bytes[name] >> 20} MiB")
    for service in services:
        report.failures += [f"{service.name} logged: {line}" for line in service.logged_errors()]
        if service.is_running:
            report.failures += [
                f"{service.name} counted: {line}" for line in _unclean_statuses(service)
            ]
    return report


def _weight(method: Method) -> int:
    """Foreign services, and methods with empty requests, get fewer calls."""
    return 8 if method.is_ours and method.descriptor.input_type.fields else 1


def _record(report: Report, call: Call) -> None:
    method = call.method.name
    report.num_inputs += call.num_sent
    report.num_inputs_by_method[method] += call.num_sent
    code = "LOST" if call.is_lost or call.code is None else call.code.name
    report.statuses[method, code] += 1
    if call.failure:
        sent = " ".join(message.hex()[:400] for message in call.inputs)
        report.failures.append(f"call {call.number}, {method}: {call.failure}\n  sent {sent}")


def _resident_bytes(services: Sequence[Member]) -> dict[str, int]:
    """Resident memory of those that live."""
    resident = {}
    for service in services:
        if service.is_running:
            status = Path(f"/proc/{service.pid}/status").read_text()
            (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
            resident[service.name] = int(line.split()[1]) * 1024
    return resident


@contextlib.asynccontextmanager
async def _bystander(services: Sequence[Member], report: Report) -> AsyncIterator[None]:
    """Repeats the same requests; their tokens must not change."""
    (gateway,) = (service for service in services if service.name == "gateway")
    requests = [
        GenerationRequest(
            prompt=task.prompt_token_ids,
            max_new_tokens=24,
            sampling=SamplingParams(temperature=temperature, seed=7),
        )
        for task, temperature in zip(rename_tasks(BUNDLED_MODEL, 3), (0.0, 0.0, 1.0), strict=True)
    ]
    async with AsyncTandemClient(gateway.address, retry=None) as client:
        expected = [(await client.generate(request)).token_ids for request in requests]

        async def ask() -> None:
            while len(report.failures) < _MOST_FAILURES:
                for request, token_ids in zip(requests, expected, strict=True):
                    start_s = time.perf_counter()
                    try:
                        async with asyncio.timeout(BOUND_S):
                            answer = (await client.generate(request)).token_ids
                        if answer != token_ids:
                            report.failures.append(f"the bystander got {answer}, not {token_ids}")
                    except (TandemError, TimeoutError) as error:
                        report.failures.append(f"the bystander got {error!r}")
                    report.num_bystander_requests += 1
                    waited_s = time.perf_counter() - start_s
                    report.longest_bystander_s = max(report.longest_bystander_s, waited_s)

        async with _in_background(ask()):
            yield


@contextlib.asynccontextmanager
async def _watcher(services: Sequence[Member], report: Report) -> AsyncIterator[None]:
    """Checks that the processes live and that health responds."""

    async def watch(service: Member) -> None:
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                if not service.is_running:
                    report.failures.append(f"{service.name} died: {service.status}")
                    return
                try:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
                    if answer.status != health_pb2.HealthCheckResponse.SERVING:
                        report.failures.append(f"{service.name} does not serve: {answer.status}")
                except grpc.aio.AioRpcError as error:
                    report.failures.append(f"{service.name}'s health: {error.code().name}")
                await asyncio.sleep(_HEALTH_INTERVAL_S)

    async with contextlib.AsyncExitStack() as stack:
        for service in services:
            await stack.enter_async_context(_in_background(watch(service)))
        yield


@contextlib.asynccontextmanager
async def _in_background(work: "asyncio._CoroutineLike[None]") -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def _check_idle(services: Sequence[Member], report: Report) -> None:
    """After all calls, waits within a bound until the verifier has no sequence and no block."""
    (verifier,) = (service for service in services if service.name == "verifier")
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        deadline_s = time.perf_counter() + BOUND_S
        while True:
            try:
                load = await stub.GetVerifierLoad(
                    verifier_pb2.GetVerifierLoadRequest(), timeout=BOUND_S
                )
            except grpc.aio.AioRpcError as error:
                report.failures.append(f"the verifier's load: {error.code().name}")
                return
            if not (load.num_running or load.num_waiting or load.num_kv_blocks_used):
                return
            if time.perf_counter() > deadline_s:
                report.failures.append(f"the verifier holds state: {load}")
                return
            await asyncio.sleep(0.05)


def _unclean_statuses(service: Member) -> list[str]:
    """The service's counters of calls that ended with a status of `_UNCLEAN`."""
    metrics = service.metrics()
    counted = {code: metrics.total("tandem_rpc_requests_total", code=code) for code in _UNCLEAN}
    return [f"{code} {count:g}" for code, count in counted.items() if count]
