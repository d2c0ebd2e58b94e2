"""The sources of a configuration: the command line, the environment, a YAML file.

Owns reading values from each, with the key that gave them. Knows neither precedence nor
validation; callers use `servicekit.config`.
"""

import argparse
import dataclasses
import os
import stat
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import pydantic_core
import yaml

from servicekit.config_keys import ConfigError, Option, alternatives, variable_name

# A device may have no end. A client takes some 100 bytes of its file.
_MAX_FILE_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value, and the flag, variable or YAML key that gave it."""

    key: str
    value: object


def read_flags(
    options: Sequence[Option], *, service: str, argv: Sequence[str]
) -> tuple[dict[str, Given], str | None]:
    """The values of the command line, by name, and the file that --config names.

    Raises:
        ConfigError: unknown flag, flag without value.
        SystemExit: on --help, after printing it.
    """
    parser = _Parser(
        prog=service,
        usage="%(prog)s [--config FILE] [--flag VALUE ...]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags win over variables, variables over the YAML file. "
        "YAML keys are the flags in snake_case.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file to read ({variable_name(service, 'config')})"
    )
    for option in options:
        shown = _show(option.default)
        text = f"{option.description} ({option.variable}; {shown})".strip().replace("%", "%%")
        if option.is_bool:
            form: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            form = {"metavar": _metavar(option)}
        parser.add_argument(
            option.flag, dest=option.name, default=argparse.SUPPRESS, help=text, **form
        )
    parsed, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        raise ConfigError(flag, "unknown flag" if flag.startswith("-") else "unexpected argument")
    flags = vars(parsed)
    config_file = flags.pop("config", None)
    given = {}
    for option in options:
        if option.name in flags:
            value = flags[option.name]
            if isinstance(value, str):
                value = _from_text(option, value)
            given[option.name] = Given(key=option.flag, value=value)
    return given, config_file


def read_environment(options: Sequence[Option], environ: Mapping[str, str]) -> dict[str, Given]:
    """The values of the environment, by name."""
    return {
        option.name: Given(key=option.variable, value=_from_text(option, environ[option.variable]))
        for option in options
        if option.variable in environ
    }


def unknown_variables(
    options: Sequence[Option], *, service: str, environ: Mapping[str, str]
) -> list[str]:
    """The variables of the service that are no option's, without those that Kubernetes sets."""
    known = {option.variable for option in options} | {variable_name(service, "config")}
    # Of the Service that has this service's name.
    links = tuple(variable_name(service, part) for part in ("port_", "service_"))
    known.add(variable_name(service, "port"))
    prefix = variable_name(service, "")
    return sorted(
        name
        for name in environ
        if name.startswith(prefix) and name not in known and not name.startswith(links)
    )


def read_yaml(key: str, file: str, options: Sequence[Option]) -> dict[str, Given]:
    """The values of a YAML file, by name.

    Args:
        key: the key that names the file: `--config` or the variable.
        file: its path.
        options: the keys that it may hold.

    Raises:
        ConfigError: unreadable file, unknown key.
    """
    content = load_yaml(key, file)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(key, f"{file}: holds a {type(content).__name__}, not keys and values")
    option_by_name = {option.name: option for option in options}
    given = {}
    for name, value in content.items():
        yaml_key = f"{file}: {name}"
        option = option_by_name.get(name)
        if option is None:
            raise ConfigError(yaml_key, "unknown key")
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, bool) for part in parts) and not option.is_bool:
            # pydantic would convert yes to the number 1.
            raise ConfigError(yaml_key, f"{value} is a bool")
        if any(isinstance(part, str) and "\0" in part for part in parts):
            # Flags and variables cannot hold one, and no file's name does.
            raise ConfigError(yaml_key, f"{value!r} holds a null character")
        if isinstance(value, str):
            value = _from_text(option, value)
        given[name] = Given(key=yaml_key, value=value)
    return given


def load_yaml(key: str, file: Path | str) -> object:
    """The content of a YAML file; a key that is given twice is an error.

    Raises:
        ConfigError: the file cannot be read, or is no YAML; the error names the key.
    """
    content = _read(key, file)
    try:
        return yaml.load(content.decode(), Loader=_YAMLLoader)
    except Exception as error:  # not YAMLError alone: `!!bool x` is a KeyError
        problem = getattr(error, "problem", None) or f"{type(error).__name__}: {error}"
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(key, f"{file}{line}: {problem}") from None


def _read(key: str, file: Path | str) -> bytes:
    """The content of a regular file or of a pipe, such as a shell's <(...)."""
    try:
        with open(file, "rb", opener=_without_waiting) as stream:
            os.set_blocking(stream.fileno(), True)
            content = stream.read(_MAX_FILE_BYTES + 1)
            is_pipe = stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except OSError as error:
        raise ConfigError(key, f"{file}: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(key, f"{file}: has more than {_MAX_FILE_BYTES >> 20} MiB")
    if is_pipe and not content:
        raise ConfigError(key, f"{file}: is a pipe without content")
    return content


def _without_waiting(file: str, flags: int) -> int:
    # Opening a pipe would wait for a writer, which may never come.
    return os.open(file, flags | os.O_NONBLOCK)


def _from_text(option: Option, text: str) -> object:
    if option.is_list:
        return [part.strip() for part in text.split(",") if part.strip()]
    if option.is_optional and not text:
        return None
    return text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse's messages are "argument --listen: expected one argument", or have no key.
        key, _, rest = message.removeprefix("argument ").partition(": ")
        if message.startswith("argument ") and rest:
            raise ConfigError(key.split("/")[0].split(",")[0], rest)
        raise ConfigError("", message)


def _show(default: object) -> str:
    if default is pydantic_core.PydanticUndefined:
        return "required"
    if default is None or default == "" or default in ((), []):
        return "default: none"
    if isinstance(default, bool):
        return f"default: {str(default).lower()}"
    if isinstance(default, (list, tuple, set, frozenset)):
        return f"default: {','.join(str(part) for part in default)}"
    return f"default: {getattr(default, 'value', default)}"


def _metavar(option: Option) -> str:
    kinds = [kind for kind in alternatives(option.type) if kind is not type(None)]
    if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(kinds[0])) + "}"
    if option.is_list:
        return "A,B,..."
    return "FILE" if kinds == [Path] else "VALUE"


class _YAMLLoader(yaml.SafeLoader):
    """Refuses a repeated key; PyYAML itself silently uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # refused below
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
