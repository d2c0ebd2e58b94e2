"""How large the messages may be that the gateway writes.

Owns the figures, all in serialized bytes. What takes them: a verifier's and a drafter's server,
and a client of `grpc`'s default settings. Each leaves room for what is around the sized part.
"""

from servicekit.limits import MAX_MESSAGE_BYTES

#: One message to a verifier (verifier.proto); an Open larger than that goes alone in one.
MAX_SESSION_REQUEST_BYTES = 1 << 20

#: The largest Open; what a client asks for beyond that is refused, by the name of the field.
MAX_OPEN_BYTES = MAX_MESSAGE_BYTES

#: One message to a drafter (drafter.proto), which takes no larger one.
MAX_PROPOSE_REQUEST_BYTES = 1 << 20

#: One chunk to a client, who takes 4 MiB unless it says otherwise. Far less, because writing it
#: keeps the event loop busy.
MAX_CHUNK_BYTES = 128 << 10

#: What a verifier may tell of one step, and what may wait of it for the client of one choice.
MAX_STEP_BYTES = 128 << 10
MAX_UNREAD_STEPS_BYTES = 4 << 20

#: A repeated field's tag and length, where the length is at most 4 bytes; a number of 32 bits.
FIELD_BYTES = 5
TOKEN_BYTES = 5
NUMBER_BYTES = 6

#: The largest number that such a field takes.
MAX_UINT32 = (1 << 32) - 1
