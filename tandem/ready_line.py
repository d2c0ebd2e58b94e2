"""The line that a server prints on stdout when it serves: `ready grpc=HOST:PORT http=HOST:PORT`.

Every service prints one, and so does `tandem up`. The keys are the kinds of address, always
including `grpc`.
"""

from collections.abc import Mapping

_WORD = "ready"


def format_ready_line(addresses: Mapping[str, str]) -> str:
    """The line for these addresses, without a line end, e.g. {"grpc": "127.0.0.1:50050"}."""
    return " ".join([_WORD, *(f"{kind}={address}" for kind, address in addresses.items())])


def parse_ready_line(line: str) -> dict[str, str] | None:
    """The addresses by kind; None if the line is not a ready line."""
    word, *pairs = line.split() or [""]
    addresses = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if word != _WORD or len(addresses) != len(pairs) or "grpc" not in addresses:
        return None
    return addresses
