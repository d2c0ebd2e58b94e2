"""Keeps the fleet's links equal to the verifiers that discovery finds.

Owns when a link begins and when it ends. A verifier that is found no more is leaving: it gets no
new sequences, its running ones go on, and its link ends when it has none, or when it is down. One
that is found again meanwhile is used again.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.peers.verifier_link import VerifierLink
from gateway.routing.fleet import Fleet
from servicekit.channels.discovery import Replica
from servicekit.config import ConfigError
from servicekit.logs import Logger

# How often links of leaving verifiers are looked at.
_CHECK_INTERVAL_S = 0.5

#: Makes a link and the task that runs it and, when it is cancelled, frees all that it holds. Raises
#: ConfigError if the operator's certificates cannot be used.
StartLink = Callable[[Replica], tuple[VerifierLink, "asyncio.Task[None]"]]


@dataclass(slots=True, kw_only=True)
class _Member:
    """A verifier with a link.

    Attributes:
        is_ending: whether its link is being closed; it cannot be used again.
    """

    replica: Replica
    link: VerifierLink
    task: asyncio.Task[None]
    is_ending: bool = False

    @property
    def is_over(self) -> bool:
        return self.link.is_leaving and (self.link.is_idle or self.link.welcome is None)


class Membership:
    """All links of a fleet; on the event loop."""

    def __init__(
        self, *, fleet: Fleet, start_link: StartLink, on_change: Callable[[], None], logger: Logger
    ) -> None:
        """Begins without any.

        Args:
            on_change: called when requests can go to fewer or to other verifiers.
        """
        self._fleet = fleet
        self._start_link = start_link
        self._on_change = on_change
        self._logger = logger
        self._found: Sequence[Replica] = ()
        self._members: dict[str, _Member] = {}
        self._unusable: set[str] = set()

    def set_replicas(self, replicas: Sequence[Replica]) -> None:
        """These verifiers are there now."""
        self._found = replicas
        found = {replica.address: replica for replica in replicas}
        for address, member in self._members.items():
            # Another name for the same address needs a new link, after the end of this one.
            is_found = found.get(address) == member.replica
            member.link.is_leaving = member.is_ending or not is_found
        self._unusable.intersection_update(found)
        self._start_missing()
        self._on_change()

    async def run(self) -> None:
        """Ends the links of verifiers that have left, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            for member in list(self._members.values()):
                if member.is_over:
                    await self._end(member)
            self._start_missing()

    def _start_missing(self) -> None:
        for replica in self._found:
            if replica.address in self._members:
                continue
            try:
                link, task = self._start_link(replica)
            except ConfigError as error:
                # Perhaps its files are just being replaced.
                if replica.address not in self._unusable:
                    self._logger.error("no_link", verifier=replica.address, error=str(error))
                self._unusable.add(replica.address)
                continue
            self._unusable.discard(replica.address)
            self._members[replica.address] = _Member(replica=replica, link=link, task=task)
            self._fleet.verifiers.append(link)

    async def _end(self, member: _Member) -> None:
        member.is_ending = True
        member.task.cancel()
        await asyncio.wait([member.task])
        del self._members[member.replica.address]
        self._fleet.verifiers.remove(member.link)
