"""Values to protobuf messages and back, by the names of their fields.

A field of a message is one of a dataclass with the same name. None, or a value's own default, is
not set in a message; what is not set in a message keeps the value's default. Enums are words: the
names of their values in lower case, without their prefix and with hyphens.
"""

import dataclasses
import enum
import functools
import json
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tandem.declared import FieldError
from tandem.v1 import sampling_pb2
from tandem.values import ReasoningTags, StructuredOutput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value", bound="DataclassInstance")
_Read = Callable[[Message, str], Any]

_GRAMMARS = ("json_schema", "regex", "choices", "lark")


def from_message(
    kind: type[_Value], message: Message, *, path: str = "", **converted: Any
) -> _Value:
    """The value of a message; repeated fields become tuples.

    Args:
        kind: a dataclass.
        message: has fields of the dataclass's names.
        path: of the message, for errors; ends with a dot, or is "".
        converted: the fields that cannot be copied.

    Raises:
        FieldError: an enum has a number that is not known.
    """
    for name, read in _readers(kind, message.DESCRIPTOR):
        if name not in converted and (value := read(message, path)) is not None:
            converted[name] = value
    return kind(**converted)


def set_message(message: Message, value: "DataclassInstance", *, path: str = "") -> None:
    """Sets the fields of a message that a value has and that differ from its defaults.

    Args:
        path: of the message, for errors; ends with a dot, or is "".

    Raises:
        FieldError: a value does not fit its field.
    """
    fields = message.DESCRIPTOR.fields_by_name
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if field.name in fields and given is not None and given != field.default:
            set_field(message, field.name, given, path=path)


def set_field(message: Message, name: str, value: Any, *, path: str = "") -> None:
    """Sets one field of a message.

    Raises:
        FieldError: the value does not fit it.
    """
    field = message.DESCRIPTOR.fields_by_name[name]
    try:
        if isinstance(value, StructuredOutput):
            _set_structured(getattr(message, name), value, f"{path}{name}.")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            set_message(getattr(message, name), value, path=f"{path}{name}.")
        elif field.enum_type is not None:
            setattr(message, name, _number(field.enum_type, value, f"{path}{name}"))
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif not field.is_repeated:
            setattr(message, name, value)
        elif isinstance(value, str | bytes):
            # It would become a value of each character.
            raise TypeError("a list is needed")
        elif field.message_type is None:
            getattr(message, name).extend(value)
        else:
            for each in value:
                set_message(getattr(message, name).add(), each, path=f"{path}{name}.")
    except FieldError:
        raise
    except (TypeError, ValueError) as error:
        raise FieldError(f"{path}{name}", _refusal(value, error)) from error


def word_of(enumeration: Any, number: int) -> str | None:
    """The word for a number of an enum; None for 0 and for numbers that are not known."""
    return _words(enumeration).get(number)


@functools.cache
def _readers(kind: type[Any], descriptor: Any) -> tuple[tuple[str, _Read], ...]:
    hints = typing.get_type_hints(kind)
    fields = descriptor.fields_by_name
    return tuple(
        (
            field.name,
            _reader(
                fields[field.name],
                hints[field.name],
                is_required=field.default is field.default_factory is dataclasses.MISSING,
            ),
        )
        for field in dataclasses.fields(kind)
        if field.name in fields
    )


def _reader(field: FieldDescriptor, hint: Any, *, is_required: bool) -> _Read:
    """Reads one field; its value is None if the field is not set, and need not be."""
    name = field.name
    if (enumeration := field.enum_type) is not None:
        if (words := _class_in(hint, enum.Enum)) is not None:
            # Of answers: a newer server may have more of them.
            read_member = functools.partial(_member, words, enumeration)
            return lambda message, _: read_member(getattr(message, name))
        return lambda message, path: _word(enumeration, getattr(message, name), f"{path}{name}")
    if field.message_type is None:
        if field.is_repeated:
            return lambda message, _: tuple(getattr(message, name)[:])
        if field.has_presence:
            return lambda message, _: getattr(message, name) if message.HasField(name) else None
        return lambda message, _: getattr(message, name)
    if field.message_type.GetOptions().map_entry:
        return lambda message, _: dict(getattr(message, name))
    kind = _class_in(hint)
    assert kind is not None, f"{field.full_name} has no dataclass"
    if field.is_repeated:
        return lambda message, path: tuple(
            from_message(kind, each, path=f"{path}{name}.") for each in getattr(message, name)
        )
    read = _structured if kind is StructuredOutput else functools.partial(_part, kind)
    return lambda message, path: (
        read(getattr(message, name), f"{path}{name}.")
        if is_required or message.HasField(name)
        else None
    )


def _part(kind: type[Any], message: Message, path: str) -> Any:
    return from_message(kind, message, path=path)


def _structured(message: sampling_pb2.StructuredOutput, _: str) -> StructuredOutput:
    given: dict[str, Any] = {}
    grammar = message.WhichOneof("grammar")
    if grammar == "choices":
        given["choices"] = tuple(message.choices.values)
    elif grammar is not None:
        given[grammar] = getattr(message, grammar)
    if message.HasField("reasoning"):
        given["reasoning"] = from_message(ReasoningTags, message.reasoning)
    return StructuredOutput(**given)


def _set_structured(
    message: sampling_pb2.StructuredOutput, value: StructuredOutput, path: str
) -> None:
    given = [name for name in _GRAMMARS if getattr(value, name) is not None]
    if len(given) != 1:
        raise FieldError(
            path[:-1], f"exactly one of its fields must be given, not {', '.join(given) or 'none'}"
        )
    (name,) = given
    grammar = getattr(value, name)
    if name == "choices":
        message.choices.SetInParent()
        set_field(message.choices, "values", grammar, path=f"{path}choices.")
    elif name == "json_schema" and not isinstance(grammar, str):
        try:
            message.json_schema = json.dumps(grammar)
        except (TypeError, ValueError, RecursionError) as error:
            raise FieldError(f"{path}{name}", f"is no JSON: {error}") from error
    else:
        set_field(message, name, grammar, path=path)
    if value.reasoning is not None:
        message.reasoning.SetInParent()
        set_message(message.reasoning, value.reasoning, path=f"{path}reasoning.")


@functools.cache
def _words(enumeration: Any) -> dict[int, str]:
    prefix = enumeration.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {
        number: value.name.removeprefix(prefix).lower().replace("_", "-")
        for number, value in enumeration.values_by_number.items()
        if number
    }


def _word(enumeration: Any, number: int, path: str) -> str | None:
    word = word_of(enumeration, number)
    if number and word is None:
        raise FieldError(path, f"has no value {number}")
    return word


def _number(enumeration: Any, word: str, path: str) -> int:
    for number, known in _words(enumeration).items():
        if known == word:
            return number
    raise FieldError(path, f"unknown value {word!r}")


def _member(kind: type[Any], enumeration: Any, number: int) -> Any:
    word = word_of(enumeration, number)
    return next((each for each in kind if each.value == word), None)


def _class_in(hint: Any, base: type[Any] | None = None) -> type[Any] | None:
    """The class that a type is, or holds: a subclass of `base`, without one a dataclass."""
    if isinstance(hint, type):
        is_found = dataclasses.is_dataclass(hint) if base is None else issubclass(hint, base)
        if is_found:
            return hint
    parts = (_class_in(each, base) for each in typing.get_args(hint))
    return next((each for each in parts if each is not None), None)


def _refusal(value: Any, error: Exception) -> str:
    """One line that shows the value, shortened because prompts are long."""
    shown = repr(dict(value) if isinstance(value, Mapping) else value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"{shown} cannot be sent: {' '.join(str(error).split())}"
