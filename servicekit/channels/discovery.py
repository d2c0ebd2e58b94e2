"""Finds the replicas of a service by DNS names that are resolved again and again.

Owns which replicas there are. Knows no channel and no service.

    entry `10.0.0.1:50052`, `localhost:50052`    one replica, as it stands
    entry `verifier.example:50052`               one replica per address of the name, as a headless
                                                 Service of Kubernetes has one per ready pod

A name that does not resolve keeps the addresses that it had: replicas outlive an outage of DNS. Of
a name with addresses of both families only the IPv4 addresses count: the others are most likely
second addresses of the same processes. So the IPv6 addresses count only once it is certain that
there are no others; where the IPv4 addresses are not known, the name does not resolve.
"""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from servicekit.address import Address, parse_address
from servicekit.logs import Logger, get_logger

#: At most; a name may have any number of addresses.
MAX_REPLICAS = 1024

# Between two resolutions of a name, also if `refresh` asks for one.
_MIN_INTERVAL_S = 1.0

# How a resolver says that there is no address of the family that it was asked for; any other error
# leaves that open. C libraries differ.
_NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY)

#: Returns the IP addresses of a host, or raises OSError.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One process of a service.

    Attributes:
        address: HOST:PORT to connect to; HOST is an IP address or localhost.
        server_name: the DNS name that led to it, which its certificate must have; None if it was
            configured by its address.
    """

    address: str
    server_name: str | None = None


async def resolve_host(host: str, port: int) -> list[str]:
    """The IP addresses of a host, by this machine's resolver: IPv4, or IPv6 if it has no others.

    Raises:
        OSError: there are none, or nobody knows.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[list[str]] = loop.create_future()

    def answer(found: list[str] | Exception) -> None:
        if answered.done():
            return
        if isinstance(found, Exception):
            answered.set_exception(found)
        else:
            answered.set_result(found)

    def look_up() -> None:
        found: list[str] | Exception
        try:
            found = _look_up(host, port)
        except Exception as error:  # a name may be none
            found = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(answer, found)

    # Not in the loop's pool, whose threads a process waits for at its end: a look-up may hang.
    threading.Thread(target=look_up, name="resolver", daemon=True).start()
    return await answered


def _look_up(host: str, port: int) -> list[str]:
    """See `resolve_host`; blocks."""
    # One family after the other: asked for both, the resolver returns those of one family if only
    # the query for the other fails. In an outage only the first look-up is made, and waited for.
    try:
        items = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno not in _NO_ADDRESS:
            raise
        items = socket.getaddrinfo(host, port, socket.AF_INET6, socket.SOCK_STREAM)
    return [str(item[4][0]) for item in items]


class Discovery:
    """The replicas of one service; on the event loop.

    Attributes:
        replicas: those known now, each address once: in the order of the entries, of one name in
            the order of addresses. Before names are resolved, those configured by address.
    """

    def __init__(
        self,
        entries: Sequence[str],
        *,
        interval_s: float,
        on_change: Callable[[Sequence[Replica]], None],
        resolve: Resolve = resolve_host,
        logger: Logger | None = None,
    ) -> None:
        """Begins with what needs no resolution; `run` resolves the names.

        Args:
            entries: HOST:PORT each.
            interval_s: between two resolutions of a name.
            on_change: called with all replicas when they have changed.

        Raises:
            ValueError: an entry is no address.
        """
        self._entries = [parse_address(entry) for entry in entries]
        self._interval_s = interval_s
        self._on_change = on_change
        self._resolve_host = resolve
        self._logger = logger or get_logger(__name__)
        # The addresses of each name, and what ends its pause.
        self._found: dict[Address, Sequence[str]] = {}
        self._due = {entry: asyncio.Event() for entry in self._entries if is_name(entry.host)}
        self._unresolved: set[Address] = set()
        self.replicas = self._merge()

    async def run(self) -> None:
        """Keeps the names resolved, until cancelled. A slow name holds up no other."""
        async with asyncio.TaskGroup() as group:
            for entry in self._due:
                group.create_task(self._keep_resolved(entry))
            await asyncio.get_running_loop().create_future()

    async def resolve(self) -> None:
        """Resolves all names once."""
        await asyncio.gather(*(self._resolve(entry) for entry in self._due))

    def refresh(self) -> None:
        """Resolves all names again soon, without waiting for the interval's end."""
        for due in self._due.values():
            due.set()

    async def _keep_resolved(self, entry: Address) -> None:
        shortest_s = min(_MIN_INTERVAL_S, self._interval_s)
        due = self._due[entry]
        while True:
            await self._resolve(entry)
            await asyncio.sleep(shortest_s)
            try:
                async with asyncio.timeout(self._interval_s - shortest_s):
                    await due.wait()
            except TimeoutError:
                pass
            due.clear()

    async def _resolve(self, entry: Address) -> None:
        try:
            found = await self._resolve_host(entry.host, entry.port)
            addresses = sorted({ipaddress.ip_address(each) for each in found}, key=int)
            if not addresses:
                raise OSError("the name has no addresses")
        except Exception as error:
            # One warning per outage.
            log = self._logger.debug if entry in self._unresolved else self._logger.warning
            log("name_not_resolved", name=str(entry), error=str(error))
            self._unresolved.add(entry)
        else:
            self._unresolved.discard(entry)
            family = min(each.version for each in addresses)
            self._found[entry] = [str(each) for each in addresses if each.version == family]
        self._apply()

    def _apply(self) -> None:
        replicas = self._merge()
        if replicas == self.replicas:
            return
        known, now = set(self.replicas), set(replicas)
        self.replicas = replicas
        self._logger.info(
            "replicas_changed",
            names=[str(entry) for entry in self._due],
            num_replicas=len(now),
            num_added=len(now - known),
            num_removed=len(known - now),
        )
        self._on_change(replicas)

    def _merge(self) -> Sequence[Replica]:
        by_address: dict[str, Replica] = {}
        for entry in self._entries:
            name = entry.host.removesuffix(".") if entry in self._due else None
            for host in self._found.get(entry, ()) if name else (entry.host,):
                address = str(Address(host=host, port=entry.port))
                by_address.setdefault(address, Replica(address=address, server_name=name))
        return list(by_address.values())[:MAX_REPLICAS]


def is_name(host: str) -> bool:
    """Whether a host is a DNS name, which may have any number of addresses."""
    return host != "localhost" and not is_ip(host)


def is_ip(host: str) -> bool:
    """Whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
