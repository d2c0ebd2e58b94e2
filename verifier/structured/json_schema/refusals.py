"""Why a schema is refused, and where: a JSON path."""

import json
import re

_MAX_NAME_CHARACTERS = 64
_MAX_PATH_CHARACTERS = 200
_PLAIN_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")
NO_CONTROL_CHARACTERS = "control characters are not supported, except \\b \\f \\n \\r \\t"


class SchemaError(ValueError):
    """The schema is refused; says where and why."""


def refused(path: str, reason: str) -> SchemaError:
    if len(path) > _MAX_PATH_CHARACTERS:
        path = f"{path[:_MAX_PATH_CHARACTERS]}..."
    return SchemaError(f"{path}: {reason}")


def member(path: str, name: str) -> str:
    if _PLAIN_NAME.fullmatch(name):
        return f"{path}.{name}"
    return f"{path}[{json.dumps(name[:_MAX_NAME_CHARACTERS], ensure_ascii=False)}]"
