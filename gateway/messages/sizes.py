"""How large the messages that the gateway writes may be.

Owns the figures, in serialized bytes. They follow from what verifiers, and clients with gRPC's
default settings, accept, and leave room for the fields around the sized part.
"""

from servicekit.channels.limits import MAX_MESSAGE_BYTES

#: One message to a verifier (verifier.proto); an Open larger than this goes in a message alone.
MAX_SESSION_REQUEST_BYTES = 1 << 20

#: The largest Open; a request that needs a larger one is refused.
MAX_OPEN_BYTES = MAX_MESSAGE_BYTES

#: The address of a drafter (verifier.proto).
MAX_DRAFTER_ADDRESS_BYTES = 256

#: One chunk to a client. Clients accept 4 MiB by default; writing that much would keep the event
#: loop busy for too long.
MAX_CHUNK_BYTES = 128 << 10

#: The trace of one step, and the unread traces of one choice.
MAX_STEP_BYTES = 128 << 10
MAX_UNREAD_STEPS_BYTES = 4 << 20

#: At most: tag and length of a repeated field of up to 256 MiB; a token id; a 32-bit number.
FIELD_BYTES = 5
TOKEN_BYTES = 5
NUMBER_BYTES = 6
