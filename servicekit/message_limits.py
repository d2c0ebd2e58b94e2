"""Limits of request messages, stated in their .proto files and enforced on arrival.

Owns reading the limits from a message type's descriptor, once, and checking them: the elements of a
repeated field or a map, the bytes of a string, the bytes of the whole message. Knows no message
type: the options of a field that carry its limits are given (`LimitOptions`).

    limits = MessageLimits(GenerateRequest.DESCRIPTOR, limits_pb2)
    limits.check_size(serialized)
    limits.check(GenerateRequest.FromString(serialized))

Only strings are copied out of a message. Not protovalidate, which cannot refuse a message by its
size before it is parsed.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default as default_pool
from google.protobuf.message import Message

from servicekit.errors import MessageLimitError

# Kinds of fields on the wire.
_VARINT = 0
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}
# How many fields of a message that is too large are read to find the largest: a few milliseconds.
_MAX_FIELDS_READ = 4096


class LimitOptions(Protocol):
    """The extensions of a field's and a message's options that carry limits; 0 is no limit.

    Attributes:
        max_items: maximum elements of a repeated field, or entries of a map.
        max_bytes: maximum bytes of a string or bytes field, or of each of its elements.
        max_message_bytes: maximum bytes of a message, serialized.
    """

    max_items: Any
    max_bytes: Any
    max_message_bytes: Any


class UnlimitedFieldError(Exception):
    """A field of variable size has no limit: a mistake in the .proto file."""


class MessageLimits:
    """The limits of one message type and of the messages in it. Immutable.

    Raises:
        UnlimitedFieldError: a field that needs a limit has none.
    """

    def __init__(self, descriptor: Descriptor, options: LimitOptions) -> None:
        self._descriptor = descriptor
        self._max_message_bytes: int = descriptor.GetOptions().Extensions[options.max_message_bytes]
        # Fields by name, with their limit or with the limits of their messages.
        self._counts: list[tuple[str, int]] = []
        self._strings: list[tuple[str, int]] = []
        self._string_lists: list[tuple[str, int]] = []
        self._messages: list[tuple[str, MessageLimits]] = []
        self._message_lists: list[tuple[str, MessageLimits]] = []
        # By the name of the `oneof`, of which a message has at most one field.
        self._oneofs: list[tuple[str, dict[str, MessageLimits]]] = []
        for oneof in descriptor.oneofs:
            self._oneofs.append((oneof.name, {}))
        for field in descriptor.fields:
            self._add(field, options)
        self._oneofs = [(name, members) for name, members in self._oneofs if members]

    def max_items(self, field: str) -> int:
        """Maximum elements of a repeated field of this message, by its name."""
        return dict(self._counts)[field]

    def max_bytes(self, field: str) -> int:
        """Maximum bytes of a string field of this message, by its name."""
        return dict([*self._strings, *self._string_lists])[field]

    @property
    def max_message_bytes(self) -> int:
        """Maximum bytes of this message; 0 is the transport's limit only."""
        return self._max_message_bytes

    def check_size(self, serialized: bytes) -> None:
        """Checks the size of a message before it is parsed; hot path.

        Raises:
            MessageLimitError: it is too large; the error names its largest field.
        """
        limit = self._max_message_bytes
        if limit and len(serialized) > limit:
            raise MessageLimitError(
                _largest_field(self._descriptor, serialized),
                f"the message has {len(serialized)} bytes, over the limit of {limit}",
            )

    def check_counts(self, message: Message) -> None:
        """Checks the number of elements of the message's own repeated fields only.

        Raises:
            MessageLimitError: there are too many; the error names the field.
        """
        for name, limit in self._counts:
            num_items = len(getattr(message, name))
            if num_items > limit:
                raise MessageLimitError(name, f"{num_items} items are over the limit of {limit}")

    def check(self, message: Message) -> None:
        """Checks the message and the messages in it; hot path.

        Raises:
            MessageLimitError: a field is over its limit; the error names its path.
        """
        self.check_counts(message)
        for name, limit in self._strings:
            value = getattr(message, name)
            if len(value) > limit or not value.isascii():
                _check_bytes(name, value, limit)
        for name, limit in self._string_lists:
            for index, value in enumerate(getattr(message, name)):
                _check_bytes(f"{name}[{index}]", value, limit)
        for name, members in self._oneofs:
            which = message.WhichOneof(name)
            limits = members.get(which)
            if limits is not None:
                limits.check_within(getattr(message, which), which)
        for name, limits in self._messages:
            if message.HasField(name):
                limits.check_within(getattr(message, name), name)
        for name, limits in self._message_lists:
            for index, element in enumerate(getattr(message, name)):
                limits.check_within(element, name, index)

    def check_within(self, message: Message, name: str, index: int | None = None) -> None:
        """Checks a message in field `name` of another one, at `index` if it is repeated.

        Raises:
            MessageLimitError: a field is over its limit; the error names its path from that other
                message on.
        """
        outer = name if index is None else f"{name}[{index}]"
        limit = self._max_message_bytes
        if limit and (num_bytes := message.ByteSize()) > limit:
            raise MessageLimitError(outer, f"{num_bytes} bytes are over the limit of {limit}")
        try:
            self.check(message)
        except MessageLimitError as error:
            raise MessageLimitError(f"{outer}.{error.field}", error.reason) from None

    def _add(self, field: FieldDescriptor, options: LimitOptions) -> None:
        extensions = field.GetOptions().Extensions
        max_items, max_bytes = extensions[options.max_items], extensions[options.max_bytes]
        is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        if field.is_repeated and not max_items:
            raise UnlimitedFieldError(f"{field.full_name} has no max_items")
        if is_text and not max_bytes:
            raise UnlimitedFieldError(f"{field.full_name} has no max_bytes")
        if field.is_repeated:
            self._counts.append((field.name, max_items))
        if is_text:
            texts = self._string_lists if field.is_repeated else self._strings
            texts.append((field.name, max_bytes))
        if field.message_type is None:
            return
        if field.message_type.GetOptions().map_entry:
            # So far entries hold numbers only, so their count is limit enough.
            for part in field.message_type.fields:
                if part.message_type is not None or part.type in (
                    FieldDescriptor.TYPE_STRING,
                    FieldDescriptor.TYPE_BYTES,
                ):
                    raise UnlimitedFieldError(f"{field.full_name} is a map of more than numbers")
            return
        limits = MessageLimits(field.message_type, options)
        if field.is_repeated:
            self._message_lists.append((field.name, limits))
        elif field.containing_oneof is not None:
            self._oneofs[field.containing_oneof.index][1][field.name] = limits
        elif limits._has_any:
            self._messages.append((field.name, limits))

    @property
    def _has_any(self) -> bool:
        fields = (self._counts, self._strings, self._string_lists)
        return any((*fields, self._messages, self._message_lists, self._oneofs))


def limits_of_methods(
    service_names: Iterable[str], options: LimitOptions
) -> dict[str, MessageLimits]:
    """The limits of every method's request, by the method's path `/package.Service/Method`.

    Raises:
        UnlimitedFieldError: a field that needs a limit has none.
    """
    limits: dict[str, MessageLimits] = {}
    for name in service_names:
        for method in default_pool().FindServiceByName(name).methods:
            limits[f"/{name}/{method.name}"] = MessageLimits(method.input_type, options)
    return limits


def _check_bytes(path: str, value: str | bytes, limit: int) -> None:
    num_bytes = len(value) if isinstance(value, bytes) or value.isascii() else len(value.encode())
    if num_bytes > limit:
        raise MessageLimitError(path, f"{num_bytes} bytes are over the limit of {limit}")


def _largest_field(descriptor: Descriptor, serialized: bytes) -> str:
    """The path of the field with most bytes; "" if they are not such a message.

    Goes on inside a field that holds one message.
    """
    path: list[str] = []
    part = memoryview(serialized)
    while True:
        num_bytes, longest = _weigh(part)
        number = max(num_bytes, key=lambda number: num_bytes[number], default=0)
        field = descriptor.fields_by_number.get(number)
        if field is None:
            return ".".join(path)
        path.append(field.name)
        if field.message_type is None or field.is_repeated or number not in longest:
            return ".".join(path)
        descriptor, part = field.message_type, longest[number]


def _weigh(serialized: memoryview) -> tuple[dict[int, int], dict[int, memoryview]]:
    """Bytes per field number, and the longest length-delimited value of each.

    Stops where the bytes are not a field, and after `_MAX_FIELDS_READ`.
    """
    num_bytes: dict[int, int] = {}
    longest: dict[int, memoryview] = {}
    at = 0
    try:
        for _ in range(_MAX_FIELDS_READ):
            start = at
            tag, at = _read_varint(serialized, at)
            number, kind = tag >> 3, tag & 7
            if kind == _LENGTH_DELIMITED:
                length, at = _read_varint(serialized, at)
                value = serialized[at : at + length]
                at += length
                if number not in longest or len(value) > len(longest[number]):
                    longest[number] = value
            elif kind == _VARINT:
                _, at = _read_varint(serialized, at)
            else:
                at += _FIXED_BYTES[kind]
            num_bytes[number] = num_bytes.get(number, 0) + at - start
    except LookupError:  # the end, or an unknown kind of field
        pass
    return num_bytes, longest


def _read_varint(serialized: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and the position behind it."""
    value = shift = 0
    while True:
        byte = serialized[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise LookupError
