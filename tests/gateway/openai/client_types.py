"""Every value that the official client's types allow in a request, one deviation at a time.

Made from the types of the installed client: what a release adds appears by itself.
"""

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union

import typing_extensions

# How often a type may stand within itself.
_MAX_NESTED = 1

# Two values of each, since one may be the plainest of a request already.
_PLAIN: Mapping[Any, Sequence[Any]] = {
    type(None): [None],
    str: ["x", "y"],
    bool: [False, True],
    int: [1, 2],
    float: [0.25, 0.5],
    object: [{"k": 1}],
}


class Deviation(NamedTuple):
    """One value at one place, in a request that holds else only what it must.

    Attributes:
        path: of the place, with the value or its kind: `messages<user>.content<list>`.
        without: the same request without the value; where there must be one, with another.
        given: the request.
    """

    path: str
    without: Any
    given: Any


class _Values(NamedTuple):
    """Those of a type.

    Attributes:
        plain: one of each kind, and each that is named by the type; with what tells it from others.
        deviations: within them.
    """

    plain: Sequence[tuple[str, Any]]
    deviations: Sequence[Deviation]


def deviations(request: Any, base: Mapping[str, Any]) -> Iterator[Deviation]:
    """Those of a request.

    Args:
        request: its type, a TypedDict.
        base: values of its fields that each request holds.
    """
    for found in _of_dict(request, base, ()):
        yield found._replace(path=found.path.removeprefix("."))


def _of(kind: Any, within: tuple[Any, ...]) -> _Values:
    if kind in _PLAIN:
        return _Values([("" if kind is object else f"={v!r}", v) for v in _PLAIN[kind]], [])
    if typing_extensions.is_typeddict(kind):
        plain = _plain_dict(kind, within)
        name = plain.get("type") or plain.get("role") or ""
        path = f"<{name}>" if name else ""
        inner = [each._replace(path=path + each.path) for each in _of_dict(kind, plain, within)]
        return _Values([(path, plain)], inner)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated):
        return _of(arguments[0], within)
    if origin is Literal:
        return _Values([(f"={value!r}", value) for value in arguments], [])
    if origin in (Union, types.UnionType):
        members = [_of(each, within) for each in arguments if within.count(each) <= _MAX_NESTED]
        return _Values(
            [each for member in members for each in member.plain],
            [each for member in members for each in member.deviations],
        )
    if origin is dict:
        # A number as well as a text.
        return _Values([("", {"1": _of(arguments[1], within).plain[0][1]})], [])
    # A list, an iterable, the client's own protocol of a sequence that is no text.
    assert len(arguments) == 1, f"a kind of type that is new: {kind}"
    of = _of(arguments[0], within)
    return _Values(
        [(f"[]{path}", [value]) for path, value in of.plain],
        [Deviation(f"[]{path}", [left], [right]) for path, left, right in of.deviations],
    )


def _fields(kind: Any) -> Iterator[tuple[str, Any, bool]]:
    """Those of a TypedDict: name, type, and whether it must be there."""
    # What says so is hidden from `__required_keys__` where a module's annotations are texts.
    for name, hint in typing_extensions.get_type_hints(kind, include_extras=True).items():
        origin: Any = typing.get_origin(hint)
        is_marked = origin is typing_extensions.Required
        is_total = name in kind.__required_keys__ and origin is not typing_extensions.NotRequired
        yield name, hint, is_marked or is_total


def _plain_dict(kind: Any, within: tuple[Any, ...]) -> dict[str, Any]:
    return {
        name: _of(hint, (*within, kind)).plain[0][1]
        for name, hint, is_required in _fields(kind)
        if is_required
    }


def _of_dict(kind: Any, plain: Mapping[str, Any], within: tuple[Any, ...]) -> Iterator[Deviation]:
    for name, hint, _ in _fields(kind):
        of = _of(hint, (*within, kind))
        for path, value in of.plain:
            if name not in plain or plain[name] != value:
                yield Deviation(f".{name}{path}", plain, {**plain, name: value})
        for path, left, right in of.deviations:
            yield Deviation(f".{name}{path}", {**plain, name: left}, {**plain, name: right})
