"""The address HOST:PORT that a server listens on or a client dials.

Owns parsing and formatting addresses, and whether they are loopback. Knows no socket and no gRPC.
Targets follow gRPC's name syntax (https://github.com/grpc/grpc/blob/master/doc/naming.md).
"""

import dataclasses
import ipaddress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host name or IP address (without brackets) and a port; port 0 means any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can be the peer."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name, which may resolve to any machine


def parse_address(text: str) -> Address:
    """Parses `127.0.0.1:50051`, `host.example:443` or `[::1]:0`.

    Raises:
        ValueError: `text` is not HOST:PORT.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{text!r} has no IPv6 address in its brackets") from None
    elif ":" in host:
        raise ValueError(f"{text!r} is not HOST:PORT (an IPv6 address goes in brackets)")
    if not colon or not host or not (port.isascii() and port.isdigit()) or " " in host:
        raise ValueError(f"{text!r} is not HOST:PORT")
    if int(port) > 65535:
        raise ValueError(f"{text!r} has a port above 65535")
    return Address(host=host, port=int(port))


def is_loopback_target(target: str) -> bool:
    """Whether a gRPC target can only be on this machine.

    So are `127.0.0.1:1`, `ipv4:127.0.0.1:1,127.0.0.1:2`, `dns:///localhost:1` and `unix:/x`.
    """
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        # dns://authority/name: the authority is a name server, which localhost does not need.
        target = rest.rpartition("/")[2]
    try:
        return all(parse_address(address).is_loopback for address in target.split(","))
    except ValueError:
        return False
