"""Describes the wire contract, one line per method, field with its limits, and enum value.

`wire_contract.txt` beside this file is the frozen description. After a deliberate change:

    python -m tests.repository.wire_contract > tests/repository/wire_contract.txt
"""

import sys
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from tandem.v1 import drafter_pb2, gateway_pb2, limits_pb2, sampling_pb2, verifier_pb2

_FILES = (drafter_pb2, gateway_pb2, limits_pb2, sampling_pb2, verifier_pb2)
_TYPES = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def describe() -> str:
    lines = [line for module in _FILES for line in _file(module.DESCRIPTOR)]
    return "\n".join(sorted(lines)) + "\n"


def _file(file: FileDescriptor) -> Iterator[str]:
    for service in file.services_by_name.values():
        for method in service.methods:
            asked = "stream " * method.client_streaming + method.input_type.name
            answered = "stream " * method.server_streaming + method.output_type.name
            yield f"rpc {service.full_name}.{method.name}({asked}) returns ({answered})"
    for message in file.message_types_by_name.values():
        yield from _message(message)
    for extension in file.extensions_by_name.values():
        assert extension.containing_type is not None, "an extension extends something"
        extended = extension.containing_type.full_name
        yield f"extension {extension.full_name} = {extension.number} of {extended}"
    for enum in file.enum_types_by_name.values():
        for value in enum.values:
            yield f"enum {enum.full_name}.{value.name} = {value.number}"


def _message(message: Descriptor) -> Iterator[str]:
    yield f"message {message.full_name}{_limits(message)}"
    for field in message.fields:
        kind = _kind(field)
        yield f"field {message.full_name}.{field.name} = {field.number}: {kind}{_limits(field)}"


def _limits(limited: Descriptor | FieldDescriptor) -> str:
    """The limits in its options, e.g. " (max_items 16) (max_bytes 256)"."""
    options = limited.GetOptions().ListFields()
    return "".join(f" ({option.name} {value})" for option, value in options if option.is_extension)


def _kind(field: FieldDescriptor) -> str:
    """Label and type, e.g. "repeated uint32" or "optional double" or "oneof prompt: string"."""
    kind = _TYPES[field.type]
    if field.message_type is not None:
        kind = field.message_type.full_name
        if field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            return f"map<{_kind(key)}, {_kind(value)}>"
    if field.enum_type is not None:
        kind = field.enum_type.full_name
    if field.is_repeated:
        return f"repeated {kind}"
    if field.containing_oneof is not None:
        synthetic = field.containing_oneof.name == f"_{field.name}"
        return f"optional {kind}" if synthetic else f"oneof {field.containing_oneof.name}: {kind}"
    return kind


if __name__ == "__main__":
    sys.stdout.write(describe())
