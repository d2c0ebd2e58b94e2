"""Configuration: flags, environment and a YAML file into one validated, frozen model.

Owns which source of a value wins and how an error names it; pydantic-settings reads flags and
variables. Knows no key: the models have them. A service's model composes `ServerOptions` as its
field `server`, `ChannelOptions` if it calls other services, and adds its own fields; the fields of
nested models share one flat namespace.

    field `max_streams`    flag --max-streams    variable TANDEM_<SERVICE>_MAX_STREAMS
                           YAML key max_streams
    precedence             flag > variable > YAML > the enclosing model's default > the field's

A list is comma-separated in a flag or variable. A bool is --x / --no-x, and true or false in a
variable. An empty value sets an optional key to None. A field marked `NO_FLAG` is no key.
Unknown variables are no errors: Kubernetes sets <SERVICE>_PORT and the like for every service that
it knows. `warn_of_unknown_variables` logs the others.
"""

import dataclasses
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import pydantic_core
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    NoDecode,
    SettingsError,
)

from servicekit.address import parse_address
from servicekit.logs import Logger
from servicekit.yaml_file import ConfigError, load_yaml

__all__ = [
    "NO_FLAG",
    "ChannelOptions",
    "ConfigError",
    "Option",
    "ServerOptions",
    "list_options",
    "load_config",
    "parse_config",
    "warn_of_unknown_variables",
]

M = TypeVar("M", bound=pydantic.BaseModel)

#: Marks a field that is no key: no operator needs another value. Tests of its limit do.
NO_FLAG = "no flag"

_HELP = """Flags win over variables, variables over the YAML file. YAML keys are the flags in
snake_case. A list is comma-separated."""


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

    drain_timeout_s: float = pydantic.Field(default=30.0, ge=0, allow_inf_nan=False)
    """How long requests may take to finish after SIGTERM, in seconds."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""

    max_concurrent_calls: Annotated[int, NO_FLAG] = 4096
    """Maximum number of calls in flight in total, without health checks; further ones are
    refused."""

    request_timeout_s: Annotated[float, NO_FLAG] = 30.0
    """How long a call may take to send its one request, in seconds."""

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

    resolve_interval_s: Annotated[float, NO_FLAG] = 5.0
    """How often the DNS names of services to call are resolved, in seconds. Each address that a
    name has is a replica of its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One key of a configuration: a field of a model or of a model nested in it."""

    name: str
    """The field's name, and the YAML key."""
    path: tuple[str, ...]
    """The names of the nested models that hold the field, then its own."""
    flag: str
    variable: str
    description: str
    type: Any
    """The field's annotation."""
    default: Any
    """`pydantic_core.PydanticUndefined` if a value is required."""

    def value_of(self, given: object) -> object:
        """A value of any source, as pydantic reads it."""
        kinds = typing.get_args(self.type) if _is_union(self.type) else (self.type,)
        if isinstance(given, str):
            if any(typing.get_origin(kind) in (list, tuple) for kind in kinds):
                return [part.strip() for part in given.split(",") if part.strip()]
            if not given and type(None) in kinds:
                return None
        elif isinstance(given, bool) and bool not in kinds:
            # pydantic would convert YAML's yes to the number 1.
            raise ValueError(f"{given} is a bool")
        return given


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
        AssertionError: two fields of the model have one name.
    """
    options = list_options(model, service=service)
    by_flag, by_variable = _read_flags_and_variables(options, service, argv, environ)
    file = by_flag.pop("config", None)
    file_key = "--config" if file else _variable(service, "config")
    file = file or by_variable.pop("config", None)
    by_yaml = _read_yaml(file_key, file, options) if file else {}

    tree: dict[str, Any] = {}
    keys: dict[tuple[str, ...], str] = {}
    for option in options:
        node = tree
        for name in option.path[:-1]:
            node = node.setdefault(name, {})
        for key, source in (
            (option.flag, by_flag),
            (option.variable, by_variable),
            (f"{file}: {option.name}", by_yaml),
        ):
            if option.name in source:
                keys[option.path] = key
                try:
                    node[option.name] = option.value_of(source[option.name])
                except ValueError as error:
                    raise ConfigError(key, str(error)) from None
                break
        else:
            keys[option.path] = option.flag
            if option.default is not pydantic_core.PydanticUndefined:
                node[option.name] = option.default
    try:
        return model.model_validate(tree)
    except pydantic.ValidationError as invalid:
        raise _named(invalid, keys) from None


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
    known = {option.variable for option in list_options(model, service=service)}
    # Kubernetes sets the others, of the Service that has this service's name.
    known |= {_variable(service, "config"), _variable(service, "port")}
    links = (_variable(service, "port_"), _variable(service, "service_"))
    for name in sorted(os.environ if environ is None else environ):
        if (
            name.startswith(_variable(service, ""))
            and name not in known
            and not name.startswith(links)
        ):
            logger.warning("unknown_variable", variable=name)


def list_options(model: type[pydantic.BaseModel], *, service: str) -> list[Option]:
    """All keys of a configuration model, in order.

    Raises:
        AssertionError: two fields share a name.
    """
    options = list(_walk(model, (), None, service))
    first_by_name: dict[str, tuple[str, ...]] = {"config": ("config",)}
    for option in options:
        first = first_by_name.setdefault(option.name, option.path)
        assert first is option.path, f"{first} and {option.path} would both be {option.flag}"
    return options


def _walk(
    model: type[pydantic.BaseModel],
    path: tuple[str, ...],
    defaults: pydantic.BaseModel | None,
    service: str,
) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        # The instance that a parent defaults to wins over the nested model's own defaults, as in
        # `server: ServerOptions = ServerOptions(listen="127.0.0.1:50051")`.
        default = field.default if defaults is None else getattr(defaults, name)
        if NO_FLAG in field.metadata:
            continue
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
            yield from _walk(kind, (*path, name), default, service)
            continue
        yield Option(
            name=name,
            path=(*path, name),
            flag="--" + name.replace("_", "-"),
            variable=_variable(service, name),
            description=" ".join((field.description or "").split()),
            type=kind,
            default=default,
        )


def _read_flags_and_variables(
    options: Sequence[Option], service: str, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    fields: dict[str, Any] = {
        "config": (Path | None, pydantic.Field(default=None, description="YAML file to read."))
    }
    for option in options:
        fields[option.name] = (
            Annotated[option.type, NoDecode],
            pydantic.Field(default=option.default, description=option.description),
        )
    flat: type[BaseSettings] = pydantic.create_model(
        service, __base__=BaseSettings, __doc__=_HELP, **fields
    )
    variables = EnvSettingsSource(flat, env_prefix=_variable(service, ""))
    variables.env_vars = {name.lower(): value for name, value in environ.items()}
    flat.model_config["env_prefix"] = _variable(service, "")  # for --help
    try:
        flags = CliSettingsSource[Any](
            flat,
            cli_prog_name=service,
            cli_parse_args=list(argv),
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
            cli_show_env_vars=True,
            cli_exit_on_error=False,
        )
    except SettingsError as error:
        raise ConfigError("", str(error).removeprefix("error parsing CLI: ")) from None
    return flags(), variables()


def _read_yaml(key: str, file: str, options: Sequence[Option]) -> dict[str, Any]:
    content = load_yaml(key, file)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(key, f"{file}: holds a {type(content).__name__}, not keys and values")
    for name in content.keys() - {option.name for option in options}:
        raise ConfigError(f"{file}: {name}", "unknown key")
    return content


def _named(invalid: pydantic.ValidationError, keys: Mapping[tuple[str, ...], str]) -> ConfigError:
    error = invalid.errors(include_url=False)[0]
    place = tuple(str(part) for part in error["loc"])
    # The place of an error inside a list or a union is deeper than its option. That of a whole
    # model is less deep: its keys contradict each other, and its message names them.
    key = next((keys[place[:end]] for end in range(len(place), 0, -1) if place[:end] in keys), "")
    if error["type"] == "missing":
        return ConfigError(key, "is required")
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if key and error["type"] not in ("value_error", "assertion_error"):
        message = f"{error['input']!r}: {message}"
    return ConfigError(key, message)


def _variable(service: str, name: str) -> str:
    return f"TANDEM_{service.replace('-', '_')}_{name}".upper()


def _is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)
