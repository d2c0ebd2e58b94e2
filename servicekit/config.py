"""Configuration: flags, environment and a YAML file into one validated, frozen model.

Owns which source of a value wins and how an error names it. Knows no key: the models have them. A
service's model composes `ServerOptions` as its field `server`, `ChannelOptions` if it calls other
services, and adds its own fields; the fields of nested models share one flat namespace of flags.

    field `max_streams`    flag --max-streams    variable TANDEM_<SERVICE>_MAX_STREAMS
                           YAML key max_streams
    precedence             flag > environment > YAML > the enclosing model's default > the field's

A list is comma-separated in a flag or variable. A bool is --x / --no-x, and true or false in a
variable. An empty value sets an optional key to None. Unknown variables are no errors: Kubernetes
sets <SERVICE>_PORT and the like for every service that it knows. `warn_of_unknown_variables` logs
the others.

Not pydantic-settings: it flattens no nested models, ignores a missing YAML file and a repeated key,
reads lists from variables as JSON only, and its errors do not name the source of a value.
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
from servicekit.config_sources import (
    Given,
    read_environment,
    read_flags,
    read_yaml,
    unknown_variables,
)
from servicekit.logs import Logger

__all__ = [
    "ChannelOptions",
    "ConfigError",
    "ServerOptions",
    "load_config",
    "parse_config",
    "warn_of_unknown_variables",
]

M = TypeVar("M", bound=pydantic.BaseModel)


class ServerOptions(pydantic.BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The options that every server has."""

    listen: str = "127.0.0.1:0"
    """Address to serve gRPC on, HOST:PORT; port 0 picks a free one."""

    metrics_listen: str | None = None
    """Address to serve Prometheus metrics on, over HTTP; not served if empty."""

    health_listen: str | None = None
    """Address to serve only grpc.health.v1 on, always in plaintext, for probes that have no
    certificate; not served if empty."""

    tls_cert: Path | None = None
    """File with the server's certificate chain (PEM); the port then speaks TLS."""

    tls_key: Path | None = None
    """File with the private key of --tls-cert (PEM)."""

    tls_client_ca: Path | None = None
    """File with the authorities (PEM) that sign clients' certificates; the port speaks mTLS."""

    allowed_clients: list[str] = []
    """Names in certificates of the clients that may call, health checks aside: DNS names or URIs,
    or the common name of a certificate that has neither. `*.` at the beginning stands for one
    label. Needs --tls-client-ca; if empty, every client with a certificate may call."""

    allow_plaintext: bool = False
    """Listen without TLS on an address that is not loopback."""

    drain_delay_s: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """How long new calls are still accepted after SIGTERM, while health already says NOT_SERVING,
    in seconds: until name services no longer return this address."""

    drain_timeout_s: float = pydantic.Field(default=30.0, ge=0, allow_inf_nan=False)
    """How long requests may take to finish after SIGTERM and --drain-delay-s, in seconds."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""

    max_concurrent_streams: int = pydantic.Field(default=1024, ge=1, le=2**31 - 1)
    """Maximum number of calls in flight on one connection; further ones wait at the client. Where
    many come and go at the limit, some are refused (UNAVAILABLE), which bounds what resets cost."""

    max_concurrent_calls: int = pydantic.Field(default=4096, ge=1)
    """Maximum number of calls in flight in total, without health checks; further ones are
    refused."""

    max_connection_age_s: float = pydantic.Field(default=0.0, ge=0, le=10**6, allow_inf_nan=False)
    """How long a connection takes new calls, in seconds: then its client is asked to open another
    one (GOAWAY) and finds new replicas; calls in flight end undisturbed. 0 is no limit."""

    request_timeout_s: float = pydantic.Field(default=30.0, gt=0, allow_inf_nan=False)
    """How long a call may take to send its one request, in seconds."""

    reflection: bool = True
    """Offer gRPC reflection: names and messages of the services, to every client."""

    @pydantic.field_validator("listen", "metrics_listen", "health_listen")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            parse_address(value)
        return value


class ChannelOptions(
    pydantic.BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True
):
    """The options of a service that calls others."""

    peer_tls_ca: Path | None = None
    """File with the authorities (PEM) that sign the certificates of the services to call; calls
    then go over TLS."""

    peer_tls_cert: Path | None = None
    """File with the certificate chain (PEM) for services that ask for one (mTLS)."""

    peer_tls_key: Path | None = None
    """File with the private key of --peer-tls-cert (PEM)."""

    peer_allow_plaintext: bool = False
    """Call services without TLS on addresses that are not loopback."""

    resolve_interval_s: float = pydantic.Field(default=5.0, gt=0, allow_inf_nan=False)
    """How often the DNS names of services to call are resolved, in seconds. Each address that a
    name has is a replica of its own."""


def load_config(
    model: type[M],
    *,
    service: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> M:
    """Reads the configuration of a service, or ends the process.

    On an error, prints one line that names the key as it was given, and exits with 2. On --help,
    prints every flag with its variable and default, and exits with 0.

    Args:
        model: the model to fill; see the module's docstring.
        service: name of the program and of the environment variables (`shop`: TANDEM_SHOP_...).
        argv: the command line without the program; None is this process's.
        environ: the environment; None is this process's.
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
        AssertionError: the model cannot be configured, e.g. two fields have one name.
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


def warn_of_unknown_variables(
    model: type[pydantic.BaseModel],
    *,
    service: str,
    logger: Logger,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Logs each variable that sets nothing although it has the prefix of the service.

    The value is not logged: a misspelt variable may hold a secret.

    Args:
        model: as of `load_config`, and so are `service` and `environ`.
        logger: where they are logged.
    """
    options = list_options(model, service=service)
    names = os.environ if environ is None else environ
    for name in unknown_variables(options, service=service, environ=names):
        logger.warning("unknown_variable", variable=name)


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
    # The location of an error inside a list or a union is deeper than its option. The location of
    # an error of a whole model is less deep: its keys contradict each other and its message names
    # them.
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
