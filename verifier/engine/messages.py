"""The engine's messages: commands in, events out. No protobuf."""

import concurrent.futures
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from servicekit.errors import RequestError
from tandem.values import (
    DraftSource,
    FinishReason,
    Keep,
    StepTrace,
    TokenLogprob,
    UndraftedSteps,
)
from verifier.drafters.messages import DrafterMessage, DrafterState
from verifier.drafts.draft_buffer import Hint
from verifier.sampling.scored_rows import ScoredRows
from verifier.scheduling.sequence import OpenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """All hints of one message. `received_at_s`: monotonic time of its arrival."""

    session_id: int
    hints: list[Hint]
    received_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    session_id: int
    sequence: OpenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """`drafter_address`: its drafter's from now on; "": none; None: unchanged."""

    session_id: int
    sequence_id: str
    drafting: bool
    drafter_address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """`keep`, `keep_length`: what its drafter's pool keeps, up to which length (0: all)."""

    session_id: int
    sequence_id: str
    keep: Keep = Keep.NOTHING
    keep_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Ends a sequence whose events cannot be written; emits no further event."""

    session_id: int
    sequence_id: str
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSession:
    session_id: int
    sink: "EventSink"


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachSession:
    """Ends all sequences of the session; its sink is not called again."""

    session_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Runs a function on the engine thread, between steps."""

    function: Callable[[], Any]
    future: "concurrent.futures.Future[Any]"

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhenIdle:
    """Resolves the future once no sequence is open."""

    future: "concurrent.futures.Future[None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    pass


Command = (
    Hints
    | DrafterMessage
    | Open
    | Update
    | Close
    | Forget
    | AttachSession
    | DetachSession
    | Call
    | WhenIdle
    | Stop
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    sequence_id: str
    num_cached_tokens: int


class Decided(NamedTuple):
    """`verifier.proto`'s Decided documents the fields. One is made per sequence and step."""

    sequence_id: str
    base_length: int
    token_ids: list[int]
    num_draft_tokens: int
    num_accepted_tokens: int
    num_wanted_draft_tokens: int
    finish_reason: FinishReason | None
    logprobs: SequenceOf[TokenLogprob] = ()
    matched_ngram_length: int = 0
    source: DraftSource | None = None
    undrafted: UndraftedSteps | None = None


def cancelled(sequence_id: str, base_length: int) -> Decided:
    """The end of a sequence that was closed."""
    return Decided(
        sequence_id=sequence_id,
        base_length=base_length,
        token_ids=[],
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_wanted_draft_tokens=0,
        finish_reason=FinishReason.CANCELLED,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraced:
    """A step's trace; precedes the step's Decided, if there is one."""

    sequence_id: str
    step: StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Logprobs of prompt tokens from position `base_length` on."""

    sequence_id: str
    base_length: int
    logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The scores of a sequence's next rows, in order; the last ones end it."""

    sequence_id: str
    scored: ScoredRows
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    sequence_id: str
    error: RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterStatus:
    """A drafter's state has changed; goes to every session. `verifier.proto` documents it."""

    address: str
    state: DrafterState
    reason: str
    # Always empty; every event has this field.
    sequence_id: str = ""


Event = Opened | PromptScored | Scored | StepTraced | Decided | Rejected | DrafterStatus


def is_terminal(event: Event) -> bool:
    """Whether the event ends its sequence."""
    if isinstance(event, Decided):
        return event.finish_reason is not None
    return isinstance(event, Rejected) or (isinstance(event, Scored) and event.is_last)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """`verifier.proto`'s StepStats documents the fields."""

    step_id: int
    num_sequences: int
    num_scheduled_tokens: int
    duration_s: float
    draft_wait_s: float
    num_running: int
    num_waiting: int
    num_kv_blocks_used: int
    draft_round_trip_s: float = 0.0


class EventSink(Protocol):
    """Receives a session's events. Called by the engine thread; must not block or raise."""

    def __call__(self, events: list[Event], step: StepStats | None) -> None: ...
