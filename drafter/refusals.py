"""Why one sequence's delta was not taken. The rest of its batch is answered as ever.

    RefusedDeltaError
    ├── OutOfSyncError     the delta does not continue what is known
    └── InvalidDeltaError  a field is wrong, or asks for what this server does not offer

These become statuses of one proposal, never statuses of an RPC (those are in `errors.py`).
"""


class RefusedDeltaError(Exception):
    """One sequence's delta was not taken; nothing of it was applied."""


class OutOfSyncError(RefusedDeltaError):
    """The delta leaves a gap after the known tokens, or contradicts them.

    Attributes:
        known_length: from where the client must send again. 0: from the beginning.
    """

    def __init__(self, known_length: int) -> None:
        super().__init__(f"out of sync: {known_length} tokens are known")
        self.known_length = known_length


class InvalidDeltaError(RefusedDeltaError):
    """A field of the delta is wrong. Sending it again will not help.

    Attributes:
        field: its path in the delta, e.g. "params.min_ngram".
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
