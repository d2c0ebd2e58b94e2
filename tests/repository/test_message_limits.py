"""Bounded requests (docs/acceptance.md): every field that can grow has a limit that is enforced."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from servicekit.channels.limits import MAX_MESSAGE_BYTES
from servicekit.errors import MessageLimitError
from servicekit.message_limits import MessageLimits
from tandem.v1 import drafter_pb2, gateway_pb2, limits_pb2, verifier_pb2

METHODS: list[MethodDescriptor] = [
    method
    for module in (drafter_pb2, gateway_pb2, verifier_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
TEXT = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

# The fields from a request to a nested field.
Path = tuple[FieldDescriptor, ...]


def paths(descriptor: Descriptor, start: Path = ()) -> Iterator[Path]:
    for field in descriptor.fields:
        yield (*start, field)
        if field.message_type is not None and not is_map(field):
            yield from paths(field.message_type, (*start, field))


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def put(message: Message, path: Path, count: int, text: str) -> None:
    """Sets the field to `count` elements or a text, with one element in each repeated parent."""
    for field in path[:-1]:
        inner = getattr(message, field.name)
        message = inner.add() if field.is_repeated else inner
        message.SetInParent()
    field = path[-1]
    value = getattr(message, field.name)
    content = text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if is_map(field):
        value.update(dict.fromkeys(range(count), 1.0))
    elif field.is_repeated and field.message_type is not None:
        for _ in range(count):
            value.add()
    elif field.is_repeated:
        value.extend([content if field.type in TEXT else 1] * count)
    else:
        setattr(message, field.name, content)


def name(path: Path) -> str:
    return ".".join(field.name for field in path)


LIMITED = [
    pytest.param(method, path, id=f"{method.name}-{name(path)}")
    for method in METHODS
    for path in paths(method.input_type)
    if path[-1].is_repeated or path[-1].type in TEXT
]


@pytest.mark.parametrize(("method", "path"), LIMITED)
def test_every_field_has_a_limit_exact_to_the_element_and_the_byte(
    method: MethodDescriptor, path: Path
) -> None:
    limits = MessageLimits(method.input_type, limits_pb2)
    field = path[-1]
    options = field.GetOptions().Extensions
    cases = []
    if field.is_repeated:
        limit = options[limits_pb2.max_items]
        assert 0 < limit <= 1 << 20
        cases.append((limit, "", limit + 1, ""))
    if field.type in TEXT:
        limit = options[limits_pb2.max_bytes]
        assert 0 < limit <= MAX_MESSAGE_BYTES
        cases.append((1, "x" * limit, 1, "x" * (limit - 1) + "é"))
    assert cases
    for count, text, too_many, too_long in cases:
        within, over = GetMessageClass(method.input_type)(), GetMessageClass(method.input_type)()
        put(within, path, count, text)
        limits.check(within)
        put(over, path, too_many, too_long)
        with pytest.raises(MessageLimitError) as refusal:
            limits.check(over)
        assert refusal.value.field.replace("[0]", "") == name(path)


def test_the_methods_and_fields_are_found() -> None:
    """Guards against an empty list of cases above."""
    assert len(METHODS) >= 10
    assert {"Generate", "ListModels", "Session", "Score", "Propose", "ProposeStream"} <= {
        method.name for method in METHODS
    }
    assert len(LIMITED) >= 40
