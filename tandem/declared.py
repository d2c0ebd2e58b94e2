"""How a parameter of requests is declared: its range, its help, its name over HTTP.

A dataclass of parameters declares each by `parameter(...)`; `declared(...)` lists them. What knows
more of a parameter than its name reads it from there: validation, the OpenAI schema, flags, tests.
"""

import dataclasses
import functools
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_UINT32 = (1 << 32) - 1
MAX_UINT64 = (1 << 64) - 1


class FieldError(ValueError):
    """A field's value is not acceptable.

    Attributes:
        field: its path.
        reason: what is wrong with it, without the path.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`; without `low` itself if `is_above`."""

    low: float
    high: float = math.inf
    is_above: bool = False

    def __contains__(self, value: float) -> bool:
        # Not so for NaN, infinity, and integers that are no finite floats.
        is_in = value > self.low if self.is_above else value >= self.low
        return is_in and value <= min(self.high, sys.float_info.max)

    def __str__(self) -> str:
        opening = "(" if self.is_above else "["
        closing = f"{self.high:g}]" if math.isfinite(self.high) else "infinity)"
        return f"{opening}{self.low:g}, {closing}"


#: Of what a 32-bit field of a message can hold.
UINT32 = Range(0, MAX_UINT32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter.

    Attributes:
        name: in Python, in messages and in errors.
        type: of its value, without None.
        default: None: what it means to leave it out depends on the server.
        range: of its value, or of a mapping's values; None: any.
        help: one sentence or two.
        http_name: in the OpenAI API; "": that API asks for it in another way.
        http_low: the least value there; None: the range's.
        is_extension: whether OpenAI's own API lacks it.
        is_recommended: whether a model's `generation_config.json` may set its default over HTTP.
    """

    name: str
    type: Any
    default: Any
    range: Range | None
    help: str
    http_name: str
    http_low: float | None
    is_extension: bool
    is_recommended: bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of one that is a choice among words; empty for others."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()


def parameter(
    default: Any,
    range: Range | None = None,
    *,
    help: str,
    http_name: str | None = None,
    http_low: float | None = None,
    is_extension: bool = False,
    is_recommended: bool = False,
) -> Any:
    """A dataclass's field that declares a parameter; see `Parameter`. Its `http_name` is its own
    name if it is not given.
    """
    metadata = {
        "parameter": {
            "range": range,
            "help": help,
            "http_name": http_name,
            "http_low": http_low,
            "is_extension": is_extension,
            "is_recommended": is_recommended,
        }
    }
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=dict, hash=False, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared(kind: type[Any]) -> tuple[Parameter, ...]:
    """The parameters that a dataclass declares, in their order."""
    return _declared(kind)  # type: ignore[arg-type]


@functools.cache
def _declared(kind: type[Any]) -> tuple[Parameter, ...]:
    hints = typing.get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        said = field.metadata.get("parameter")
        if said is None:
            continue
        name = field.name if said["http_name"] is None else said["http_name"]
        is_mapping = field.default is dataclasses.MISSING
        found.append(
            Parameter(
                name=field.name,
                type=_without_none(hints[field.name]),
                default={} if is_mapping else field.default,
                **(said | {"http_name": name}),
            )
        )
    return tuple(found)


def check_ranges(value: "DataclassInstance", *, path: str = "") -> None:
    """Checks the values of declared parameters.

    Raises:
        FieldError: one is out of its range.
    """
    for each in declared(type(value)):
        given = getattr(value, each.name)
        if each.range is None or given is None:
            continue
        for number in given.values() if isinstance(given, Mapping) else (given,):
            if number not in each.range:
                raise FieldError(f"{path}{each.name}", f"must be in {each.range}, not {number:g}")


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (each for each in typing.get_args(hint) if each is not types.NoneType)
    return hint
