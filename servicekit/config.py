"""Configuration: flags, environment and a YAML file into one validated, frozen model.

Owns where a value comes from and how an error names it. Knows no key: the models bring them.
A service's model composes `ServerOptions` as its field `server`, `ChannelOptions` where it dials
others, and adds its own fields; the fields of nested models share one flat namespace of flags.

    field `max_streams`    flag --max-streams    variable TANDEM_<SERVICE>_MAX_STREAMS
                           YAML key max_streams
    precedence             flag > environment > YAML > the enclosing model's default > the field's

A list is comma-separated in a flag or variable; a bool is --x / --no-x, and true or false in a
variable; an empty value sets a key that may be absent to absent. Variables that no field has are
not errors: Kubernetes puts <SERVICE>_PORT and the like there for every service that it knows.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic
import pydantic_core

from servicekit.address import parse_address
from servicekit.config_keys import ConfigError, Option, list_options, variable_name
from servicekit.config_sources import Given, read_environment, read_flags, read_yaml

__all__ = ["ChannelOptions", "ConfigError", "ServerOptions", "load_config", "parse_config"]

M = TypeVar("M", bound=pydantic.BaseModel)


class ServerOptions(pydantic.BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The options that every server has; compose it as field `server`."""

    listen: str = "127.0.0.1:0"
    """Address to serve gRPC on, HOST:PORT; port 0 picks a free one."""

    metrics_listen: str | None = None
    """Address to serve Prometheus metrics on, over HTTP; none if empty."""

    health_listen: str | None = None
    """Address to serve grpc.health.v1 alone on, always in plaintext, for probes that have no
    certificate; none if empty."""

    tls_cert: Path | None = None
    """File with the server's certificate chain (PEM); the port then speaks TLS."""

    tls_key: Path | None = None
    """File with the private key of --tls-cert (PEM)."""

    tls_client_ca: Path | None = None
    """File with the authorities (PEM) one of which must have signed a client's certificate; the
    port then speaks mTLS."""

    allow_plaintext: bool = False
    """Listen without TLS on an address that is not loopback."""

    drain_delay_s: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """How long after SIGTERM new calls are still taken while health says NOT_SERVING already, in
    seconds: until nobody finds this address by its name any more."""

    drain_timeout_s: float = pydantic.Field(default=30.0, ge=0, allow_inf_nan=False)
    """How long to let requests finish after SIGTERM and the delay, in seconds."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""

    max_concurrent_streams: int = pydantic.Field(default=1024, ge=1, le=2**31 - 1)
    """Most calls in flight on one connection; further ones wait at the client."""

    max_concurrent_calls: int = pydantic.Field(default=4096, ge=1)
    """Most calls at a time over all connections, health checks aside; further ones are refused."""

    request_timeout_s: float = pydantic.Field(default=30.0, gt=0, allow_inf_nan=False)
    """How long a call may take to send its one request, in seconds."""

    reflection: bool = True
    """Offer gRPC reflection: the services' names and messages, to whoever may connect."""

    @pydantic.field_validator("listen", "metrics_listen", "health_listen")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            parse_address(value)
        return value


class ChannelOptions(
    pydantic.BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True
):
    """How to reach other services; compose it where a service dials any."""

    peer_tls_ca: Path | None = None
    """File with the authorities (PEM) that sign the certificates of the services that this one
    calls; calls then go over TLS."""

    peer_tls_cert: Path | None = None
    """File with the certificate chain (PEM) to show to services that ask for one (mTLS)."""

    peer_tls_key: Path | None = None
    """File with the private key of --peer-tls-cert (PEM)."""

    peer_allow_plaintext: bool = False
    """Call services that are not on loopback without TLS."""


def load_config(
    model: type[M],
    *,
    service: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> M:
    """Reads the configuration of a service, or ends the process.

    On an error, prints one line that names the key in the form in which it was given, and exits
    with 2. On --help, prints every flag with its variable and default, and exits with 0.

    Args:
        model: what to fill; see the module's docstring.
        service: names the environment variables (`shop`: TANDEM_SHOP_...) and the program.
        argv: the command line without the program; None for this process's.
        environ: the environment; None for this process's.
    """
    try:
        return parse_config(
            model,
            service=service,
            argv=sys.argv[1:] if argv is None else argv,
            environ=os.environ if environ is None else environ,
        )
    except ConfigError as error:
        print(f"{service}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


def parse_config(
    model: type[M], *, service: str, argv: Sequence[str], environ: Mapping[str, str]
) -> M:
    """Reads the configuration of a service.

    Raises:
        ConfigError: unknown key, wrong value, missing value, unreadable file.
        SystemExit: on --help, after printing it.
        AssertionError: the model itself cannot be configured (two fields of one name, say).
    """
    options = list_options(model, service=service)
    by_flag, config_file = read_flags(options, service=service, argv=argv)
    config_key = "--config"
    if config_file is None:
        config_key = variable_name(service, "config")
        config_file = environ.get(config_key) or None
    by_yaml = {} if config_file is None else read_yaml(config_key, config_file, options)
    by_variable = read_environment(options, environ)
    return _validate(model, options, {**by_yaml, **by_variable, **by_flag})


def _validate(model: type[M], options: Sequence[Option], given: Mapping[str, Given]) -> M:
    tree: dict[str, Any] = {}
    key_by_path: dict[tuple[str, ...], str] = {}
    for option in options:
        node = tree
        for name in option.path[:-1]:
            node = node.setdefault(name, {})
        key_by_path[option.path] = option.flag
        if option.name in given:
            node[option.name] = given[option.name].value
            key_by_path[option.path] = given[option.name].key
        elif option.default is not pydantic_core.PydanticUndefined:
            node[option.name] = option.default
    try:
        return model.model_validate(tree)
    except pydantic.ValidationError as invalid:
        error = invalid.errors(include_url=False)[0]
    location = tuple(str(part) for part in error["loc"])
    # A location goes deeper than its option in a list or a union, and less deep when a model
    # as a whole is refused: then several keys disagree and the message names them.
    key = next(
        (
            key_by_path[location[:end]]
            for end in range(len(location), 0, -1)
            if location[:end] in key_by_path
        ),
        "",
    )
    if error["type"] == "missing":
        raise ConfigError(key, "is required")
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if key and error["type"] not in ("value_error", "assertion_error"):
        message = f"{error['input']!r}: {message}"
    raise ConfigError(key, message)
