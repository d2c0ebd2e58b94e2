"""A TCP socket that listens on an address, for servers that are given one.

Of a wildcard address, 0.0.0.0 or [::], gRPC's ports serve IPv4 and IPv6. So do these: a service is
reached by the same addresses at all of its ports, also in a cluster that has only IPv6.
"""

import ipaddress
import socket

from servicekit.address import Address
from servicekit.yaml_file import ConfigError


def listening_socket(address: Address, *, backlog: int) -> socket.socket:
    """Binds and listens; the caller closes it.

    Args:
        backlog: connections that may wait to be accepted.

    Raises:
        OSError: the address cannot be bound.
        UnicodeError: the host is a name that cannot be encoded.
    """
    host, is_wildcard = address.host, _is_wildcard(address.host)
    if is_wildcard:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off where the protocol is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_wildcard and family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, address.port))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def cannot_listen(flag: str, listen: str, error: Exception) -> ConfigError:
    """What the user is told of an address, given by the flag, that could not be bound."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(flag, f"cannot listen on {listen}: {reason}")


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
