"""Declared parameters as fields of a request's body, and back.

Owns how a declaration becomes a field that pydantic checks, with the limits that the .proto files
state of texts and lists.
"""

import math
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from servicekit.message_limits import MessageLimits
from tandem.declared import UINT32, Parameter, Range, declared

# How a value becomes one of the declared range, by parameter.
_WITHIN_RANGE: Mapping[str, Callable[[int], int]] = {
    "top_k": lambda value: max(value, 0),
    "seed": lambda value: value % 2**64,
}


def at_most(max_bytes: int) -> pydantic.AfterValidator:
    """Of text, .proto files limit bytes, not characters."""

    def check(text: str) -> str:
        if len(text.encode()) > max_bytes:
            raise PydanticCustomError("too_long", f"at most {max_bytes} bytes of UTF-8")
        return text

    return pydantic.AfterValidator(check)


def fields_of(kind: type[Any], limits: MessageLimits) -> dict[str, Any]:
    """The fields of a model whose parameters a dataclass declares, for `pydantic.create_model`.

    Args:
        limits: of the message with these parameters.
    """
    return {
        each.http_name: (
            _type(each, limits) | None,
            Field(default=None, description="Extension: " * each.is_extension + each.help),
        )
        for each in declared(kind)
        if each.http_name
    }


def values_of(kind: type[Any], parsed: pydantic.BaseModel | None) -> dict[str, Any]:
    """The values that a body gives, by their declared names."""
    values: dict[str, Any] = {}
    for each in declared(kind):
        value = getattr(parsed, each.http_name, None) if each.http_name else None
        if value is not None:
            within_range = _WITHIN_RANGE.get(each.name)
            values[each.name] = value if within_range is None else within_range(value)
    return values


def _type(parameter: Parameter, limits: MessageLimits) -> Any:
    kind = parameter.type
    if kind is str:
        max_bytes = limits.max_bytes(parameter.name)
        return Annotated[str, Field(max_length=max_bytes), at_most(max_bytes)]
    if parameter.range is None:
        return kind
    if kind in (int, float):
        return _number(kind, parameter.range, parameter.http_low)
    assert isinstance(parameter.default, Mapping), parameter.name
    key, value = _number(int, UINT32), _number(float, parameter.range)
    most = Field(max_length=limits.max_items(parameter.name))
    return Annotated[types.GenericAlias(dict, (key, value)), most]


def _number(kind: type[Any], range: Range, low: float | None = None) -> Any:
    least = kind(range.low if low is None else low)
    return Annotated[
        kind,
        Field(
            gt=least if range.is_above else None,
            ge=None if range.is_above else least,
            le=kind(range.high) if math.isfinite(range.high) else None,
            allow_inf_nan=False if kind is float else None,
        ),
    ]
