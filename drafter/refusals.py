"""What fails alone, while the rest of a batch or of the drafter goes on.

A refused delta becomes a status of its proposal, never the status of an RPC (`errors.py`). An
internal failure is logged and counted.
"""

from enum import Enum


class OutOfSyncError(Exception):
    """The delta leaves a gap after the known tokens, or contradicts them; nothing was applied.

    Attributes:
        known_length: from where the client must send again. 0: from the beginning.
    """

    def __init__(self, known_length: int) -> None:
        super().__init__(f"out of sync: {known_length} tokens are known")
        self.known_length = known_length


class InvalidDeltaError(Exception):
    """A field of the delta is wrong, or not offered; nothing was applied. A retry will not help.

    Attributes:
        field: its path in the delta, e.g. "params.min_ngram".
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


class Failure(Enum):
    """An internal failure; logged where it is counted, or once for several in a row."""

    SEQUENCE = "sequence"
    """A sequence could not be appended to, indexed or drafted for; it was forgotten."""
    RELEASE = "release"
    """A release on a stream named no possible sequence, or its text could not be fed to a pool."""
    POOLS = "pools"
    """The work on the pools; they were emptied."""
    SNAPSHOT = "snapshot"
    """A snapshot file could not be read or restored."""
    UPKEEP = "upkeep"
    """The search for expired sequences; it is repeated."""
