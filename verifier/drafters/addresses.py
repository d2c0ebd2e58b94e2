"""Which drafters a session may name, and which of them this verifier connects to.

An entry HOST:PORT of the operator admits that address, hosts below its name (drafter-0.HOST:PORT),
and, where HOST is a DNS name, every IP address that it resolves to. A gateway may have seen a new
address of a name before this verifier has: so a session may name any IP address at the port of such
an entry, but nothing is connected before the name has resolved to it.
"""

import asyncio
import re
from collections.abc import Sequence

from servicekit.address import Address, parse_address
from servicekit.channels.discovery import Discovery, Replica, Resolve, is_ip, is_name, resolve_host

# What may stand before an entry's name. gRPC reads an address as a URI: of "evil#.drafter:50051" it
# would connect to "evil".
_HOST_BELOW = re.compile(r"([a-z0-9_-]+\.)+", re.ASCII | re.IGNORECASE)

_LOCALHOST = ("127.0.0.1", "::1")


class AdmittedDrafters:
    """The drafters that this verifier may use; owned by the event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        resolve_interval_s: float = 5.0,
        resolve: Resolve = resolve_host,
    ) -> None:
        """Admits what the entries say; `run` resolves them.

        Args:
            addresses: HOST:PORT each.

        Raises:
            ValueError: one is not.
        """
        self._entries = [parse_address(each) for each in addresses]
        self._discovery = Discovery(
            addresses, interval_s=resolve_interval_s, on_change=self._on_change, resolve=resolve
        )
        self._changed = asyncio.Event()
        self._by_address: dict[str, Replica] = {}
        self._on_change(self._discovery.replicas)

    def admit(self, address: str) -> bool:
        """Whether a session may name this address."""
        try:
            asked = parse_address(address)
        except ValueError:
            return False
        return self.may_connect(asked) or (
            is_ip(asked.host)
            and any(asked.port == entry.port and is_name(entry.host) for entry in self._entries)
        )

    def may_connect(self, asked: Address) -> bool:
        """Whether this verifier may connect to an address now."""
        return str(asked) in self._by_address or any(
            asked.port == entry.port and _is_at_or_below(asked.host, entry.host)
            for entry in self._entries
        )

    async def wait(self, asked: Address) -> None:
        """Waits until this verifier may connect to an address; has names resolved again soon."""
        if not self.may_connect(asked):
            self._discovery.refresh()
        while not self.may_connect(asked):
            await self._changed.wait()

    def server_name(self, asked: Address) -> str | None:
        """The name that the certificate of an address must have; None: its own host."""
        replica = self._by_address.get(str(asked))
        return None if replica is None else replica.server_name

    async def run(self) -> None:
        """Keeps the names resolved, until cancelled."""
        await self._discovery.run()

    async def resolve(self) -> None:
        """Resolves all names once."""
        await self._discovery.resolve()

    def _on_change(self, replicas: Sequence[Replica]) -> None:
        self._by_address = {each.address: each for each in replicas}
        self._changed.set()
        self._changed = asyncio.Event()


def _is_at_or_below(host: str, entry: str) -> bool:
    return (
        host == entry
        or (entry == "localhost" and host in _LOCALHOST)
        or (host.endswith(entry) and _HOST_BELOW.fullmatch(host.removesuffix(entry)) is not None)
    )
