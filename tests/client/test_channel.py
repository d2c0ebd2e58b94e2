"""Addresses, tokens and certificates, before any connection."""

from pathlib import Path

import pytest
import trustme

from tandem.client import TandemClient
from tandem.transport.channel import TlsOptions, _check, parse_targets, token_metadata
from tests.encrypted_key import encrypted_key


@pytest.mark.parametrize(
    ("targets", "parsed"),
    [
        ("a:1", ("a:1",)),
        ("a:1,b:2", ("a:1", "b:2")),
        ("a:1, [::1]:2", ("a:1", "[::1]:2")),
        (["a:1", "dns:///b:2"], ("a:1", "dns:///b:2")),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", ("ipv4:10.0.0.1:1,10.0.0.2:1",)),
        ("unix:/tmp/socket", ("unix:/tmp/socket",)),
    ],
)
def test_targets_are_one_name_or_several(targets: str | list[str], parsed: tuple[str, ...]) -> None:
    assert parse_targets(targets) == parsed


@pytest.mark.parametrize("targets", ["", ",", "a:1,", [], ["a:1", " "]])
def test_an_empty_target_is_refused(targets: str | list[str]) -> None:
    with pytest.raises(ValueError, match="no list of addresses"):
        TandemClient(targets)


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:1",
        "127.1.2.3:1",
        "[::1]:1",
        "localhost:1",
        "dns:///localhost:1",
        "ipv4:127.0.0.1:1,127.0.0.2:1",
        "unix:/tmp/socket",
    ],
)
def test_a_token_goes_to_this_machine_in_plaintext(target: str) -> None:
    metadata = token_metadata("secret", [target], None, allow_plaintext=False)
    assert metadata == (("authorization", "Bearer secret"),)


@pytest.mark.parametrize(
    "target",
    [
        "gateway:1",
        "10.0.0.1:1",
        "127.0.0.1.example:1",
        "localhost.example:1",
        "[2001:db8::1]:1",
        "dns:///gateway:1",
        "dns://127.0.0.1/gateway:1",
        "ipv4:127.0.0.1:1,10.0.0.1:1",
    ],
)
def test_a_token_goes_to_other_machines_only_over_tls_or_by_permission(target: str) -> None:
    with pytest.raises(ValueError, match="in plaintext"):
        TandemClient(["127.0.0.1:1", target], token="secret")
    assert token_metadata("secret", [target], None, allow_plaintext=True)
    assert token_metadata("secret", [target], TlsOptions(), allow_plaintext=False)


@pytest.mark.parametrize("token", ["", "two words", "line\n", "sch\u00f6n"])
def test_what_no_header_can_hold_is_no_token_and_is_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match="token must be") as caught:
        TandemClient("127.0.0.1:1", token=token)
    assert not token or token not in str(caught.value)


def test_an_encrypted_key_is_an_error_and_asks_for_no_passphrase(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert", tmp_path / "key"
    own = trustme.CA().issue_cert("127.0.0.1")
    own.cert_chain_pems[0].write_to_path(str(certificate))
    key.write_bytes(encrypted_key(own))
    with pytest.raises(OSError, match=f"{key} is encrypted"):
        _check(TlsOptions(certificate=certificate, key=key))
