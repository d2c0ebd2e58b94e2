"""YAML files that operators write, and the error that names a wrong one.

Owns reading such a file. Knows no key of it: `servicekit.config` and other readers do.
"""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml


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
    try:
        return yaml.load(Path(file).read_bytes().decode(), Loader=_YAMLLoader)
    except OSError as error:
        raise ConfigError(key, f"{file}: {error.strerror}") from None
    except Exception as error:  # not YAMLError alone: `!!bool x` is a KeyError
        problem = getattr(error, "problem", None) or f"{type(error).__name__}: {error}"
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(key, f"{file}{line}: {problem}") from None


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
