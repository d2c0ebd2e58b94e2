"""The file of clients: who may call, for which tenant, and with which quotas.

    tenants:
      acme:
        max_concurrent_requests: 64       # quotas of the tenant, each optional
        max_waiting_tokens: 500000
        weight: 2                         # its part of what tenants share; 1 if absent
        clients:
          - token_sha256: 5e884898...     # of the token, in hex
            max_priority: 10              # 0 if absent
            expires: 2027-01-31T00:00:00Z
          - certificate: batch.acme.example

Owns the form of the file. A client is known by its token's digest or by a name in its certificate.
The file holds no token: who reads it cannot call.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pydantic

from gateway.requests.principal import Principal
from servicekit.config import ConfigError
from servicekit.yaml_file import load_yaml

FLAG = "--clients"


class _Part(pydantic.BaseModel, extra="forbid", strict=True):
    """A part of the file."""


def _midnight(value: object) -> object:
    """A day is its first moment in UTC."""
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC)
    return value


class _Client(_Part):
    token_sha256: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")] | None = None
    certificate: Annotated[str, pydantic.Field(min_length=1)] | None = None
    max_priority: int = 0
    expires: Annotated[pydantic.AwareDatetime, pydantic.BeforeValidator(_midnight)] | None = None

    @pydantic.model_validator(mode="after")
    def _has_one_credential(self) -> "_Client":
        if (self.token_sha256 is None) == (self.certificate is None):
            raise ValueError("a client has either token_sha256 or certificate")
        return self


class _Tenant(_Part):
    max_concurrent_requests: Annotated[int, pydantic.Field(ge=1)] | None = None
    max_waiting_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    # As `Open.tenant_weight` allows.
    weight: Annotated[int, pydantic.Field(ge=1, le=1000)] = 1
    clients: list[_Client] = []


class _File(_Part):
    # The name is a part of pool ids and salts, whose length is limited.
    tenants: dict[Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], _Tenant]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownClient:
    """A client of the file.

    Attributes:
        expires_s: when its credential becomes invalid, in Unix seconds; None: never.
    """

    principal: Principal
    expires_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownClients:
    """The clients of the file, by the SHA-256 of their token, or by certificate name."""

    by_token: Mapping[bytes, KnownClient]
    by_certificate: Mapping[str, KnownClient]


def read_clients(path: Path) -> KnownClients:
    """Reads the file.

    Raises:
        ConfigError: it cannot be read, has another form, or a credential twice.
    """
    content = load_yaml(FLAG, path)
    if not isinstance(content, dict):
        raise ConfigError(FLAG, f"{path}: holds no tenants")
    try:
        file = _File.model_validate(content)
    except pydantic.ValidationError as invalid:
        # Without the value: it may be a token that was written into the wrong place.
        error = invalid.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in error["loc"])
        message = error["msg"].removeprefix("Value error, ")
        raise ConfigError(FLAG, f"{path}: {place}: {message}") from None
    by_token: dict[bytes, KnownClient] = {}
    by_certificate: dict[str, KnownClient] = {}
    for name, tenant in file.tenants.items():
        for index, client in enumerate(tenant.clients):
            known = _known(name, tenant, client)
            if client.token_sha256 is not None:
                is_new = by_token.setdefault(bytes.fromhex(client.token_sha256), known) is known
            else:
                assert client.certificate is not None, "checked"
                is_new = by_certificate.setdefault(client.certificate, known) is known
            if not is_new:
                raise ConfigError(
                    FLAG, f"{path}: tenants.{name}.clients.{index}: is a client already"
                )
    return KnownClients(by_token=by_token, by_certificate=by_certificate)


def _known(name: str, tenant: _Tenant, client: _Client) -> KnownClient:
    return KnownClient(
        principal=Principal(
            tenant=name,
            max_priority=client.max_priority,
            max_choices=tenant.max_concurrent_requests,
            max_waiting_tokens=tenant.max_waiting_tokens,
            weight=tenant.weight,
        ),
        expires_s=None if client.expires is None else client.expires.timestamp(),
    )
