"""One run of one drill: requests, a disturbance, and what must hold afterwards.

Owns the checks that every drill makes: tokens and offsets against the undisturbed run, statuses,
errors in logs, and that nothing is left of any request. Does not know what is disturbed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import grpc

from servicekit.channels.limits import KEEPALIVE
from tandem.v1 import gateway_pb2, verifier_pb2, verifier_pb2_grpc
from tests.drills.fleet import Fleet, Member
from tests.drills.requests import Losses, Record, generate, generate_anywhere

OK = grpc.StatusCode.OK

#: Tokens of each choice before a disturbance: it is underway, and far from its end.
TOKENS_UNDERWAY = 8
#: A bound for what should take a second or a few, on a busy machine.
PATIENCE_S = 60.0

_POLL_INTERVAL_S = 0.1
_LOAD_TIMEOUT_S = 5.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one or more runs of a drill gave.

    Attributes:
        detections_s: from the disturbance until the gateway moved a choice, each.
        recoveries_s: from the disturbance until its first token from elsewhere, each; in the same
            order, and a choice that had got all its tokens is in neither.
        problems: what did not hold, for people to read; tokens beside.
    """

    num_runs: int = 0
    num_requests: int = 0
    losses: Losses = field(default_factory=Losses)
    detections_s: list[float] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.losses == Losses() and not self.problems

    def add(self, other: "Outcome") -> None:
        self.num_runs += other.num_runs
        self.num_requests += other.num_requests
        self.losses += other.losses
        self.detections_s += other.detections_s
        self.recoveries_s += other.recoveries_s
        self.problems += other.problems


class Undisturbed:
    """The output of each request in a fleet that nobody disturbs; computed once."""

    def __init__(self) -> None:
        self._records: dict[bytes, Record] = {}

    def find(self, request: gateway_pb2.GenerateRequest) -> Record:
        return self._records[_key(request)]

    async def learn(
        self, requests: Sequence[gateway_pb2.GenerateRequest], channel: grpc.aio.Channel
    ) -> None:
        """Sends those requests whose output is not known.

        Raises:
            RuntimeError: one did not succeed.
        """
        new = [Record(request=each) for each in requests if _key(each) not in self._records]
        await asyncio.gather(*(generate(channel, record) for record in new))
        for record in new:
            if record.codes != [OK]:
                raise RuntimeError(f"undisturbed, a request ended with {record.codes}")
            self._records[_key(record.request)] = record


class Run:
    """One run; on one event loop, made by `one_run`."""

    def __init__(
        self, fleet: Fleet, undisturbed: Undisturbed, channels: Sequence[grpc.aio.Channel]
    ) -> None:
        self.fleet = fleet
        self.channels = channels
        self.outcome = Outcome(num_runs=1)
        self.disturbed_at_s = 0.0
        self._undisturbed = undisturbed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._log_sizes = {member.name: member.log_size() for member in fleet.members}
        self._before = {member.name: member.metrics() for member in fleet.members}

    # Requests.

    async def learn(self, requests: Sequence[gateway_pb2.GenerateRequest]) -> None:
        """Sends requests whose output is not known, before anything is disturbed."""
        await self._undisturbed.learn(requests, self.channels[0])

    async def start(
        self,
        requests: Sequence[gateway_pb2.GenerateRequest],
        *,
        through: Sequence[grpc.aio.Channel] = (),
        channel: grpc.aio.Channel | None = None,
        timeout_s: float | None = None,
        token: str | None = None,
    ) -> list[Record]:
        """Sends requests to the first gateway; their output is recorded as it comes.

        Args:
            through: channels to gateways instead: when one is UNAVAILABLE, the client goes on
                through the next.
            channel: to a gateway instead.
            timeout_s, token: the deadline of each request and its client's token; not with
                `through`.
        """
        await self.learn(requests)
        records = []
        for request in requests:
            named = gateway_pb2.GenerateRequest()
            named.CopyFrom(request)
            named.request_id = f"drill-{time.time_ns()}-{len(self._tasks)}"
            record = Record(request=named)
            self._tasks[named.request_id] = asyncio.create_task(
                generate_anywhere(through, record)
                if through
                else generate(channel or self.channels[0], record, timeout_s=timeout_s, token=token)
            )
            records.append(record)
        self.outcome.num_requests += len(records)
        return records

    async def underway(self, records: Sequence[Record]) -> None:
        """Waits until every choice has some tokens."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(record.has_tokens(TOKENS_UNDERWAY) for record in records))

    def disturb(self, action: Callable[[], object]) -> None:
        """Carries out the disturbance; times count from here."""
        self.disturbed_at_s = time.time()
        action()

    def cancel(self, record: Record) -> None:
        """The client cancels its call."""
        self._tasks[record.request.request_id].cancel()

    async def finish(
        self, records: Sequence[Record], *, codes: Sequence[grpc.StatusCode] = (OK,)
    ) -> None:
        """Waits until the requests have ended, and compares what they got.

        Args:
            codes: how the last call of each may end. Unless it is OK, tokens may be missing at the
                end.
        """
        tasks = [self._tasks[record.request.request_id] for record in records]
        _, pending = await asyncio.wait(tasks, timeout=PATIENCE_S)
        for task in pending:
            self.outcome.problems.append(f"a request did not end within {PATIENCE_S:g} s")
            task.cancel()
        for record in records:
            self.expect(
                bool(record.codes) and record.codes[-1] in codes,
                f"a request ended with {[each.name for each in record.codes]}",
            )
            self.compare(record, is_whole=record.codes[-1:] == [OK])

    def compare(self, record: Record, *, is_whole: bool) -> None:
        """Counts the record's differences from the undisturbed run."""
        expected = self._undisturbed.find(record.request)
        self.outcome.losses += record.compare(expected, is_whole=is_whole)

    # What must hold.

    def expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.outcome.problems.append(problem)

    def moved(self, member: Member, name: str, **labels: str) -> float:
        """By how much a counter of a process grew since the run began, over all its series.

        A process that was started again counts from zero.
        """
        return member.metrics().increase(self._before[member.name], name, **labels)

    def expect_moved(self, member: Member, name: str, **labels: str) -> None:
        self.expect(
            self.moved(member, name, **labels) > 0, f"{member.name}: {name} {labels} did not move"
        )

    def log_lines(self, member: Member) -> list[dict[str, Any]]:
        """What a process has logged since the run began."""
        return member.log_lines(since=self._log_sizes[member.name])

    def expect_resumed(self, records: Sequence[Record], reason: str) -> None:
        """Choices moved to another verifier for this reason, and each move is counted."""
        gateway = self.fleet.gateways[0]
        self.expect_moved(gateway, "tandem_request_resumes_total", reason=reason)
        counted = self.moved(gateway, "tandem_request_resumes_total")
        told = sum(record.num_resumes for record in records)
        self.expect(counted == told, f"{told} moves in usages, {counted:g} counted")
        self._measure(records)

    def expect_went_on(self, records: Sequence[Record]) -> None:
        """Calls broke off and their clients went on through another gateway."""
        broken = [record for record in records if len(record.codes) > 1]
        self.expect(bool(broken), "no call broke off: nothing was disturbed")
        for record in broken:
            ended_at_s, num_pieces = record.ends[0]
            # None, if only the end was lost.
            for piece in record.pieces[num_pieces : num_pieces + 1]:
                self._add(ended_at_s, piece.at_s)

    def expect_not_resumed(self, records: Sequence[Record]) -> None:
        """No choice moved, unless a verifier got so little processor time that it seemed stuck."""
        num_resumes = sum(record.num_resumes for record in records)
        gateway = self.fleet.gateways[0]
        seemed_stuck = any(
            line["event"] == "peer_down" and line["reason"].startswith(("no answer", "no step"))
            for line in self.log_lines(gateway)
        )
        self.expect(not num_resumes or seemed_stuck, f"{num_resumes} choices were moved")

    def _measure(self, records: Sequence[Record]) -> None:
        """Reads from the gateway's log when each choice moved, and when it went on."""
        gateway = self.fleet.gateways[0]
        by_id = {record.request.request_id: record for record in records}
        for line in self.log_lines(gateway):
            record = by_id.get(line.get("request_id", ""))
            if line["event"] != "choice_resumed" or record is None:
                continue
            moved_at_s = datetime.fromisoformat(line["ts"]).timestamp()
            known = line["num_tokens"] - len(record.request.tokens.token_ids)
            came_at_s = [
                piece.at_s
                for piece in record.pieces
                if piece.choice_index == line["choice_index"]
                and piece.offset + len(piece.token_ids) > known
            ]
            self.expect(bool(came_at_s), "a moved choice got no token")
            if came_at_s:
                self._add(moved_at_s, came_at_s[0])

    def _add(self, detected_at_s: float, recovered_at_s: float) -> None:
        self.outcome.detections_s.append(detected_at_s - self.disturbed_at_s)
        self.outcome.recoveries_s.append(recovered_at_s - self.disturbed_at_s)

    async def settle(self) -> None:
        """Waits until the fleet is whole and idle again; what is left after a while is a problem.

        Also collects errors that the processes logged.
        """
        for member in self.fleet.members:
            self.expect(member.is_running, f"{member.name} has died")
        if self.outcome.problems:
            return
        await self.connected()
        await self._nothing_is_left(self._open_sequences)
        for member in self.fleet.members:
            for line in member.logged_errors(since=self._log_sizes[member.name]):
                self.outcome.problems.append(f"{member.name} logged {line}")

    async def connected(self) -> None:
        """Waits until every gateway has every verifier."""
        await self._nothing_is_left(self._missing_peers)

    async def _nothing_is_left(self, find: Callable[[], Awaitable[list[str]]]) -> None:
        left: list[str] = []

        async def is_done() -> bool:
            left[:] = await find()
            return not left

        if not await until(is_done):
            self.outcome.problems += left

    async def _missing_peers(self) -> list[str]:
        missing = []
        for gateway in self.fleet.gateways:
            metrics = await asyncio.to_thread(gateway.metrics)
            num_connected = metrics.total("tandem_peers_connected", kind="verifier")
            if num_connected < len(self.fleet.verifiers):
                missing.append(f"{gateway.name} has {num_connected:g} verifiers")
        return missing

    async def _open_sequences(self) -> list[str]:
        left = []
        for verifier in self.fleet.verifiers:
            load = await self.load(verifier)
            if load is None:
                left.append(f"{verifier.name} does not answer")
            elif load.num_running or load.num_waiting or load.num_kv_blocks_used:
                left.append(
                    f"{verifier.name} has {load.num_running} running and {load.num_waiting} "
                    f"waiting sequences, {load.num_kv_blocks_used} K/V blocks"
                )
        for gateway in self.fleet.gateways:
            metrics = await asyncio.to_thread(gateway.metrics)
            for name in ("tandem_num_requests_running", "tandem_num_requests_waiting"):
                if metrics.total(name):
                    left.append(f"{gateway.name}: {name} {metrics.total(name):g}")
        return left

    # Verifiers.

    async def load(self, verifier: Member) -> verifier_pb2.GetVerifierLoadResponse | None:
        """What a verifier has to do; None if it does not answer."""
        async with grpc.aio.insecure_channel(verifier.address) as channel:
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            try:
                load: verifier_pb2.GetVerifierLoadResponse = await stub.GetVerifierLoad(
                    verifier_pb2.GetVerifierLoadRequest(), timeout=_LOAD_TIMEOUT_S
                )
            except grpc.aio.AioRpcError:
                return None
            return load

    async def num_running(self, verifier: Member) -> int:
        """How many sequences a verifier runs; 0 if it does not answer."""
        load = await self.load(verifier)
        return 0 if load is None else load.num_running

    async def busiest_verifier(self) -> int:
        """The index of the verifier that runs most sequences."""
        running = [await self.num_running(verifier) for verifier in self.fleet.verifiers]
        return running.index(max(running))


async def until(condition: Callable[[], Awaitable[bool]], *, timeout_s: float = PATIENCE_S) -> bool:
    """Polls a condition that has no event; returns whether it became true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(_POLL_INTERVAL_S)
    return True


@asynccontextmanager
async def one_run(fleet: Fleet, undisturbed: Undisturbed) -> AsyncIterator[Run]:
    """A run with channels of its own."""
    channels = [
        grpc.aio.insecure_channel(
            gateway.address, options=[*KEEPALIVE, ("grpc.use_local_subchannel_pool", 1)]
        )
        for gateway in fleet.gateways
    ]
    run = Run(fleet, undisturbed, channels)
    try:
        yield run
    finally:
        for task in run._tasks.values():
            task.cancel()
        await asyncio.gather(*run._tasks.values(), return_exceptions=True)
        for channel in channels:
            await channel.close()


def _key(request: gateway_pb2.GenerateRequest) -> bytes:
    """Of requests that have the same output."""
    nameless = gateway_pb2.GenerateRequest()
    nameless.CopyFrom(request)
    nameless.request_id = ""
    return nameless.SerializeToString(deterministic=True)
