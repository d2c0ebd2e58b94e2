"""One sequence inside the engine: its tokens, its place in the KV cache, its drafts."""

import collections
import enum
from dataclasses import dataclass, field

from verifier.draft_buffer import DraftBuffer
from verifier.draft_wait import FirstTokenRecord
from verifier.sampling import Sampling

# How many publications a late hint can still be timed against.
PUBLICATIONS_KEPT = 8


class DraftWait(enum.Enum):
    """How long a step may wait for this sequence's draft."""

    ADAPTIVE = "adaptive"
    NEVER = "never"
    ALWAYS = "always"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSequence:
    """A validated request to start a sequence. `verifier.proto`'s Open documents the fields."""

    sequence_id: str
    token_ids: list[int]
    prompt_length: int
    sampling: Sampling
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    draft_wait: DraftWait
    drafting: bool
    num_speculative_tokens: int


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Owned by the engine thread.

    Invariants: `token_ids` never holds an unverified draft; K/V of the first
    `num_computed_tokens` tokens is valid; a running sequence's `block_table` covers them.
    """

    sequence_id: str
    session_id: int
    token_ids: list[int]
    prompt_length: int
    # The length at which generation ends: max_new_tokens or the model's limit.
    max_length: int
    sampling: Sampling
    stop_token_ids: frozenset[int]
    draft_wait: DraftWait
    drafting: bool
    num_speculative_tokens: int
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    # Blocks set aside at admission, so that a running sequence never has to wait for one.
    num_reserved_blocks: int = 0
    # What the session was told last: how long a hint would be useful. 0: none is to come.
    num_wanted_draft_tokens: int = 0
    draft_buffer: DraftBuffer = field(default_factory=DraftBuffer)
    first_token_record: FirstTokenRecord = field(default_factory=FirstTokenRecord)
    # The last few (length, monotonic seconds) told to the session: hints for that length are
    # under way since. Empty before the first token.
    publications: collections.deque[tuple[int, float]] = field(
        default_factory=lambda: collections.deque(maxlen=PUBLICATIONS_KEPT)
    )

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return self.max_length - len(self.token_ids)

    @property
    def published_at_s(self) -> float:
        """When the current length was published; only for a sequence that was."""
        return self.publications[-1][1]

    @property
    def is_prefilling(self) -> bool:
        """More than the last token's K/V is missing."""
        return self.num_computed_tokens < len(self.token_ids) - 1

    @property
    def can_draft(self) -> bool:
        """There is use for a hint."""
        return self.num_speculative_tokens > 0 and self.remaining > 1

    @property
    def has_draft(self) -> bool:
        """A hint is here, and there is use for it."""
        return self.can_draft and bool(self.draft_buffer)

    @property
    def lacks_awaited_draft(self) -> bool:
        """Under ALWAYS: the hint for exactly the current length is not here yet."""
        return self.draft_wait is DraftWait.ALWAYS and self.can_draft and self._awaits_answer

    @property
    def hopes_for_draft(self) -> bool:
        """Under ADAPTIVE: there is no draft, and a hint may be under way."""
        return (
            self.draft_wait is DraftWait.ADAPTIVE
            and self.can_draft
            and not self.draft_buffer
            and self._awaits_answer
        )

    @property
    def _awaits_answer(self) -> bool:
        """A hint for the current length was asked for, is expected, and has not come back."""
        return (
            self.drafting
            and self.num_wanted_draft_tokens > 0
            and self.draft_buffer.answered_length < len(self.token_ids)
        )
