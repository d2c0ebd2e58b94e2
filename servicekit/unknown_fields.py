"""Fields of a message that this version's .proto files do not have: its sender is newer.

Protobuf skips them. A service asks for them where one must not be ignored.
"""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet


def find_unknown_field(message: Message) -> str:
    """The path and number of an unknown field of the message, or of the messages in it, e.g.
    `sampling.16`; "" if there is none. Repeated messages are not searched.
    """
    for field in UnknownFieldSet(message):  # type: ignore[attr-defined]
        return str(field.field_number)
    for descriptor, value in message.ListFields():
        if isinstance(value, Message) and (path := find_unknown_field(value)):
            return f"{descriptor.name}.{path}"
    return ""
