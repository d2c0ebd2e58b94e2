"""The file of clients: its form, and whom the credentials in it stand for."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import UnauthenticatedError
from gateway.requests.authenticator import Authenticator
from gateway.requests.clients_file import read_clients
from gateway.requests.principal import Principal
from servicekit.config import ConfigError
from servicekit.interceptors.callers import Caller
from tests.gateway.clients import digest_of

CONTENT = f"""
tenants:
  acme:
    max_concurrent_requests: 64
    max_waiting_tokens: 500000
    weight: 2
    clients:
      - token_sha256: {digest_of("first")}
        max_priority: 10
      - token_sha256: {digest_of("second")}
        expires: 2027-01-31
      - certificate: batch.acme.test
  other:
    clients:
      - token_sha256: {digest_of("third")}
        expires: 2027-01-31T12:00:00+02:00
"""


def authenticator(
    tmp_path: Path, *, now: datetime.datetime = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
) -> Authenticator:
    path = tmp_path / "clients.yaml"
    path.write_text(CONTENT)
    clients = read_clients(path)
    return Authenticator(lambda: clients, clock=now.timestamp)


def principal_of(
    whom: Authenticator, token: str | None = None, names: Sequence[str] = ()
) -> Principal:
    return whom.authenticate(Caller(token=token, certificate_names=tuple(names)))


def test_a_token_or_a_certificate_stands_for_a_client_of_a_tenant(tmp_path: Path) -> None:
    known = authenticator(tmp_path)
    acme: dict[str, Any] = {"tenant": "acme", "max_choices": 64, "max_waiting_tokens": 500_000}
    acme["weight"] = 2
    assert principal_of(known, "first") == Principal(**acme, max_priority=10)
    assert principal_of(known, "second") == Principal(**acme, max_priority=0)
    assert principal_of(known, "third") == Principal(tenant="other", max_priority=0)
    names = ["unknown.test", "batch.acme.test"]
    assert principal_of(known, names=names) == Principal(**acme, max_priority=0)
    assert principal_of(known, "third", names).tenant == "other", "the token counts"


@pytest.mark.parametrize(
    ("token", "names"),
    [
        (None, []),
        (None, ["unknown.test"]),
        (None, ["BATCH.acme.test"]),
        ("", []),
        ("firs", []),
        ("first ", []),
        (digest_of("first"), []),
        ("\udcff", []),
        ("wrong", ["batch.acme.test"]),
    ],
)
def test_other_credentials_are_refused_without_saying_why(
    tmp_path: Path, token: str | None, names: list[str]
) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        principal_of(authenticator(tmp_path), token, names)
    assert caught.value.message == "valid credentials are required"


@pytest.mark.parametrize(
    ("token", "end"),
    [
        ("second", datetime.datetime(2027, 1, 31, tzinfo=datetime.UTC)),
        ("third", datetime.datetime(2027, 1, 31, 10, tzinfo=datetime.UTC)),
    ],
)
def test_credentials_expire(tmp_path: Path, token: str, end: datetime.datetime) -> None:
    before = authenticator(tmp_path, now=end - datetime.timedelta(seconds=1))
    assert principal_of(before, token).tenant
    with pytest.raises(UnauthenticatedError) as caught:
        principal_of(authenticator(tmp_path, now=end), token)
    assert caught.value.message == "valid credentials are required"


A_CLIENT = f"token_sha256: {digest_of('first')}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "clients.yaml: holds no tenants"),
        ("- tenants", "clients.yaml: holds no tenants"),
        ("tenants:\n  a: {clients: [{}]}", "either token_sha256 or certificate"),
        (
            f"tenants:\n  a: {{clients: [{{{A_CLIENT}, certificate: b}}]}}",
            "either token_sha256 or certificate",
        ),
        ("tenants:\n  a: {clients: [{token: secret-token}]}", "tenants.a.clients.0.token: Extra"),
        ("tenants:\n  a: {clients: [{token_sha256: secret-token}]}", "should match pattern"),
        ("tenants:\n  a/b: {}", "should match pattern"),
        ("tenants:\n  '': {}", "should match pattern"),
        ("tenants:\n  a: {max_concurrent_requests: 0}", "greater than or equal to 1"),
        ("tenants:\n  a: {max_waiting_tokens: yes}", "valid integer"),
        ("tenants:\n  a: {weight: 0}", "greater than or equal to 1"),
        ("tenants:\n  a: {weight: 1001}", "less than or equal to 1000"),
        ("tenants:\n  a: {weight: 0.5}", "valid integer"),
        (f"tenants:\n  a: {{clients: [{{{A_CLIENT}, expires: 2027-01-01T00:00:00}}]}}", "timezone"),
        (f"tenants:\n  a: {{clients: [{{{A_CLIENT}}}, {{{A_CLIENT}}}]}}", "a client already"),
        (
            f"tenants:\n  a: {{clients: [{{{A_CLIENT}}}]}}\n  b: {{clients: [{{{A_CLIENT}}}]}}",
            "tenants.b.clients.0: is a client already",
        ),
        ("tenants:\n  a: {}\n  a: {}", "a is given twice"),
        ("tenants: [", "line 1"),
    ],
)
def test_a_wrong_file_is_an_error_that_shows_the_place_and_no_secret(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "clients.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_clients(path)
    assert caught.value.key == "--clients"
    assert str(path) in caught.value.message
    assert message in caught.value.message
    assert "secret-token" not in str(caught.value)
