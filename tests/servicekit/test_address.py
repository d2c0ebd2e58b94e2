"""Addresses: parsing, formatting, and whether they are on this machine."""

import pytest

from servicekit.address import Address, is_loopback_target, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("localhost:0", "localhost", 0),
        ("peer.example.svc:443", "peer.example.svc", 443),
        ("[::1]:65535", "::1", 65535),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host=host, port=port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", ":", "host", "host:", ":80", "host:http", "host:-1", "host:65536", "::1:80", "[::1]",
     "[host]:80", "a b:80", "host:\u0663"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not HOST:PORT|above 65535|no IPv6") as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1", "dns:///localhost:1",
     "dns:localhost:1", "ipv4:127.0.0.1:1,127.0.0.1:2", "ipv6:[::1]:1", "unix:/run/x",
     "unix-abstract:x"],
)  # fmt: skip
def test_targets_on_this_machine_are_loopback(target: str) -> None:
    assert is_loopback_target(target)


@pytest.mark.parametrize(
    "target",
    ["10.0.0.1:1", "0.0.0.0:1", "[::]:1", "example.org:1", "localhost.example.org:1",
     "dns:///example.org:1", "dns://localhost/example.org:1", "ipv4:127.0.0.1:1,10.0.0.1:1",
     "xds:///localhost:1", "localhost", ""],
)  # fmt: skip
def test_all_other_targets_are_not(target: str) -> None:
    assert not is_loopback_target(target)
