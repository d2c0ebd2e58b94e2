"""Fields of a message that this version's .proto files do not have: its sender is newer.

Protobuf skips them. A service asks for them where one must not be ignored.
"""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

# The library makes an object of each unknown field: of a message of megabytes, a second's work.
_MAX_LISTED_BYTES = 4_096


def find_unknown_field(message: Message) -> str:
    """The path and number of an unknown field of the message, or of the messages in it, e.g.
    `sampling.16`; "" if there is none. Its last part is `unknown` where the bytes of unknown fields
    are very many, or in a repeated message.
    """
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    num_bytes = message.ByteSize() - known.ByteSize()
    if not num_bytes:
        return ""
    for descriptor, value in message.ListFields():
        if isinstance(value, Message) and (path := find_unknown_field(value)):
            return f"{descriptor.name}.{path}"
    if num_bytes > _MAX_LISTED_BYTES:
        return "unknown"
    for field in UnknownFieldSet(message):  # type: ignore[attr-defined]
        return str(field.field_number)
    return "unknown"  # in a repeated message
