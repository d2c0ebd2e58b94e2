"""Ports for services that are told where to listen before they run."""

import contextlib
import random
import socket
from collections.abc import Collection

# Below those that Linux gives out for port 0, from 32,768 on. In random order, so that two
# processes hardly ever try the same one.
_ports = iter(random.sample(range(10_000, 32_000), 22_000))


def free_port(*, besides: Collection[int] = ()) -> int:
    """A port of the loopback interface that nobody listens on now; never the same one again.

    The system gives it to nobody who asks for port 0: it stays free while its owner is down.

    Args:
        besides: ports to leave out, since others will listen there.

    Raises:
        OSError: this process has had all ports.
    """
    for port in _ports:
        if port in besides:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("this process has had all ports")


def check_port(port: int) -> None:
    """Whether a service could listen on this port of the loopback interface; on 0 it always could.

    Raises:
        OSError: it could not.
    """
    with socket.socket() as probe:
        # As servers do: connections that have just ended are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()
