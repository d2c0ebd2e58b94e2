"""What the loop's side of a drafter's link tells the engine, and what it can be told."""

import enum
from dataclasses import dataclass
from typing import Protocol


class DrafterState(enum.Enum):
    """Whether a drafter answers; the values are the wire's names and a metric's labels."""

    # Not reached yet; a hint may still come.
    CONNECTING = "connecting"
    UP = "up"
    # Repeatedly late: put aside for a while.
    SLOW = "slow"
    DOWN = "down"
    # Not connected, because no sequence needs it.
    IDLE = "idle"


class DrafterFault(enum.StrEnum):
    """What a drafter did wrong; the label of `tandem_verifier_drafter_faults`."""

    ODD_PROPOSAL = "odd_proposal"  # a proposal that is no answer to its delta
    REFUSED_SEQUENCE = "refused_sequence"  # it takes no tokens of a sequence
    LATE_ANSWER = "late_answer"  # no answer within the deadline
    PROTOCOL_ERROR = "protocol_error"  # an answer that is none; ends the stream
    INTERNAL_ERROR = "internal_error"  # ours


class Link(Protocol):
    """The engine's hold on one drafter's stream. For any thread; nothing here blocks."""

    def send(self, epoch: int, data: bytes, max_answer_bytes: int) -> None:
        """Sends a message, if the stream that was up in this epoch still is."""

    def fail(self, epoch: int, reason: str) -> None:
        """Ends that stream; another one is begun."""

    def close(self) -> None:
        """Ends everything; nothing is reported any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterUp:
    """A stream is up. Whatever the drafter had may be lost."""

    link: Link
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterAnswered:
    """An answer, in the order of the requests. `received_at_s`: monotonic."""

    link: Link
    epoch: int
    data: bytes
    received_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLate:
    """No answer came within another deadline.

    Attributes:
        is_aside: too often in a row: the drafter is put aside.
    """

    link: Link
    is_aside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterBack:
    """A drafter that was put aside has answered everything, and a pause is over."""

    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterDown:
    """The stream has ended, or could not be begun; it will be tried again.

    Attributes:
        fault: what the drafter, or this verifier, did wrong. None: nothing that is known.
    """

    link: Link
    reason: str
    fault: DrafterFault | None = None


DrafterMessage = DrafterUp | DrafterAnswered | DrafterLate | DrafterBack | DrafterDown
