"""What failed alone while everything else went on, for the count of such failures."""

from enum import Enum


class Failure(Enum):
    """Each is logged where it is counted, or once for several in a row."""

    SEQUENCE = "sequence"
    """A sequence could not be appended to, indexed or drafted for; it was forgotten."""
    RELEASE = "release"
    """A release on a stream named no possible sequence, or its text could not be kept."""
    POOLS = "pools"
    """The work on the pools; they were emptied."""
    SNAPSHOT = "snapshot"
    """A snapshot file could not be read, or what it says not be restored."""
    UPKEEP = "upkeep"
    """Looking for what has expired; it is tried again."""
