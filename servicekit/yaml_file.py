"""YAML files that operators write, and the error that names a wrong one.

Owns reading such a file. Knows no key of it: `servicekit.config` and other readers do.
"""

import os
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

# A device may have no end. A client takes some 100 bytes of its file.
_MAX_FILE_BYTES = 64 << 20


class ConfigError(Exception):
    """An invalid configuration.

    Args:
        key: the wrong key as it was given: `--listen`, `TANDEM_SHOP_LISTEN`,
            `shop.yaml: listen`; "" if the message names it, or if several contradict each other.
        message: the reason, with the offending value.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        self.message = message


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
