"""Scripted verifiers and a gateway that is connected to all of them."""

from collections.abc import Awaitable, Callable, Sequence

from tandem.v1 import verifier_pb2
from tests.gateway.running_gateway import (
    GenerateCall,
    RunningGateway,
    read,
    until,
)
from tests.gateway.scripted_verifier import ScriptedVerifier


class Fleet:
    """Scripted verifiers and a gateway that is connected to all of them."""

    def __init__(self, verifiers: Sequence[ScriptedVerifier], running: RunningGateway) -> None:
        self.verifiers = verifiers
        self.running = running

    async def owner(self, num_opens: int = 1) -> tuple[ScriptedVerifier, verifier_pb2.Open]:
        """Waits until so many sequences were opened in all; the one that is live."""
        await until(lambda: self.num_opens() == num_opens)
        live = self.live_ids()
        (found,) = [
            (verifier, opened)
            for verifier in self.verifiers
            for opened in verifier.commands("open")
            if opened.sequence_id in live
        ]
        return found

    def num_opens(self) -> int:
        return sum(len(each.commands("open")) for each in self.verifiers)

    def live_ids(self) -> set[str]:
        return set(self.running.gateway.coordinator._sequences._by_id)

    def others(self, verifier: ScriptedVerifier) -> list[ScriptedVerifier]:
        return [each for each in self.verifiers if each is not verifier]

    def num_resumes(self, reason: str) -> float:
        return self.running.sample("tandem_request_resumes_total", reason=reason)


StartFleet = Callable[..., Awaitable[Fleet]]


async def call_with_output(fleet: Fleet) -> tuple[GenerateCall, ScriptedVerifier]:
    """The first call, [1], of which the client has a token, 5; and its verifier."""
    call = fleet.running.call(1)
    owner, opened = await fleet.owner()
    owner.send(owner.opened(opened.sequence_id), owner.decided(opened.sequence_id, 1, [5]))
    await read(call)
    await read(call)
    return call, owner
