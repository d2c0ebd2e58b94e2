"""One sequence inside the engine: its tokens, its place in the KV cache, its drafts."""

import collections
import enum
from array import array
from dataclasses import dataclass, field

from tandem.values import DraftWait
from verifier.drafts.depth_policy import SequenceDepth
from verifier.drafts.draft_buffer import DraftBuffer
from verifier.drafts.draft_wait import HintRecord
from verifier.drafts.drafted_by import AnswersHints, DraftedBy
from verifier.drafts.hint_log import HintLog
from verifier.sampling import Sampling
from verifier.sampling.adjustments import Adjustments
from verifier.scheduling.states import SequenceStates
from verifier.structured.grammar_state import GrammarState

# Limit of a traced sequence's tokens in one step: its trace is 60 KB at most, one message.
MAX_TRACED_TOKENS = 4096
# Publications kept to time late hints.
PUBLICATIONS_KEPT = 8


class ScoringMethod(enum.Enum):
    """How drafts are run through the model; both methods give the same logits rows."""

    SINGLE_PASS = "single_pass"
    # K + 1 entries of one query each for K drafts; see `step_batch.py`.
    BATCH_EXPANSION = "batch_expansion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What is requested of a sequence that is only scored, not continued.

    Its `token_ids` are a prompt and then its drafts; all of them are computed as a prompt is. The
    prompt's last row and the rows of the drafts are scored.
    """

    method: ScoringMethod
    # How many of the likeliest tokens to report per row.
    num_top: int
    # Whether the prompt's other rows are scored, too.
    prompt_logprobs: bool = False
    # Tensors to return: each draft row's distribution, and the output layer's input.
    keeps_distributions: bool = False
    keeps_hidden_states: bool = False


# Compared by identity: two sequences with equal values are still two.
@dataclass(slots=True, kw_only=True, eq=False)
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
    # Sequences share prefix-cache blocks only with equal salts.
    cache_salt: str = ""
    # Of those with this salt, a tenant's, when tenants take turns.
    tenant_weight: int = 1
    # Higher first; within one priority tenants take turns, each in order of arrival.
    priority: int = 0
    # Limits the drafts of a hint per token of its match; 0: no such limit.
    tokens_per_match: int = 0
    # Whether an event describes every step of the sequence.
    trace: bool = False
    # Who drafts, by which matching policy. None: drafts come from the session.
    drafted_by: DraftedBy | None = None
    # None: the sequence is continued.
    scoring: Scoring | None = None
    # The grammar that the output follows. None: it is free.
    grammar: GrammarState | None = None

    @property
    def num_held_tokens(self) -> int:
        """Tokens that it holds while it waits: its own, and those of its prediction."""
        num_predicted = len(self.drafted_by.predicted_token_ids) if self.drafted_by else 0
        return len(self.token_ids) + num_predicted

    @property
    def goes_on(self) -> bool:
        """Whether it has output, which another verifier decided, or this one, earlier."""
        return self.scoring is None and len(self.token_ids) > self.prompt_length

    @property
    def requested_rows(self) -> range:
        """Positions of the tokens whose rows are scored. Logprobs of the first output token are
        not among them: they come with that token.
        """
        if self.scoring is not None:
            first = 0 if self.scoring.prompt_logprobs else self.prompt_length - 1
            return range(first, len(self.token_ids))
        has_rows = self.sampling.prompt_logprobs is not None
        return range(self.prompt_length - 1) if has_rows else range(0)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence(OpenSequence):
    """One that was opened. Owned by the engine thread.

    Invariants: `token_ids` never holds an unverified draft; K/V of the first
    `num_computed_tokens` tokens is valid; a running sequence's `block_table` covers them, a
    waiting one's is empty.
    """

    session_id: int
    # The length at which generation ends, by max_new_tokens or the model's limit.
    max_length: int
    # As in `ScheduledTokens`.
    uses_long_rope: bool = False
    # The scheduler's count.
    arrival: int = 0
    # The turn by which it last began to run, counted by changes of the tenant.
    turn: int = 0
    is_running: bool = False
    is_preempted: bool = False
    # Positions whose logprobs are not yet reported. Reported ones leave the range, so that a
    # sequence that is preempted and recomputed reports none twice.
    rows_to_score: range = range(0)
    num_computed_tokens: int = 0
    # Those that had been computed when it was last preempted.
    num_tokens_before: int = 0
    # Tokens whose K/V was found in the prefix cache at the first admission.
    num_cached_tokens: int = 0
    # int32, see `BlockTable` in `batch_layout.py`.
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    # Identifies the block table since the last admission; see `BatchLayout`.
    table_id: int = 0
    # Digests of the first whole blocks of `token_ids`, computed when needed.
    block_digests: list[bytes] = field(default_factory=list)
    # How many blocks of `block_table`, from the first on, are entered in the prefix cache.
    num_entered_blocks: int = 0
    # Of a running sequence, if the model has recurrent states.
    states: SequenceStates | None = None
    # The hint length last requested. 0: no hint is requested.
    num_wanted_draft_tokens: int = 0
    # The drafter of `drafted_by`, unless it takes no tokens of this sequence.
    drafter: AnswersHints | None = None
    # The drafter that took no more tokens of it; "": none has.
    refused_by: str = ""
    # Made when the first token is sampled, if logits are adjusted.
    adjustments: Adjustments | None = None
    draft_buffer: DraftBuffer = field(default_factory=DraftBuffer)
    depth_record: SequenceDepth = field(default_factory=SequenceDepth)
    # Steps without drafts, by the fields of `UndraftedSteps`.
    undrafted: dict[str, int] = field(default_factory=lambda: collections.defaultdict(int))
    # None: not traced.
    hint_log: HintLog | None = None
    hint_record: HintRecord = field(default_factory=HintRecord)
    # The last published (length, monotonic seconds): hints for that length are under way since
    # then. Empty before the first token; without a drafter the last few are kept, to time hints.
    publications: collections.deque[tuple[int, float]] = field(
        default_factory=lambda: collections.deque(maxlen=PUBLICATIONS_KEPT)
    )

    @property
    def max_cached_tokens(self) -> int:
        """Limit of the tokens whose K/V may come from the cache; later rows must be computed."""
        return self.rows_to_score.start if self.rows_to_score else len(self.token_ids) - 1

    def scored_rows(self, num_new_tokens: int) -> range:
        """The part of `rows_to_score` that the next `num_new_tokens` tokens cover."""
        end = self.num_computed_tokens + num_new_tokens
        rows = self.rows_to_score
        start = max(rows.start, self.num_computed_tokens)
        return range(start, max(start, min(rows.stop, end)))

    def longest_chunk(self, max_rows: int) -> int:
        """Limit of the next chunk's tokens: they cover at most `max_rows` of `rows_to_score`, and
        for a traced sequence at most `MAX_TRACED_TOKENS`.
        """
        num_missing = len(self.token_ids) - self.num_computed_tokens
        if self.hint_log is not None:
            num_missing = min(num_missing, MAX_TRACED_TOKENS)
        if len(self.rows_to_score) <= max_rows:
            return num_missing
        num_allowed = self.rows_to_score.start + max_rows - self.num_computed_tokens
        return max(0, min(num_missing, num_allowed))

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return self.max_length - len(self.token_ids)

    @property
    def published_at_s(self) -> float:
        """When the current length was published; only after the first publication."""
        return self.publications[-1][1]

    @property
    def names_drafter(self) -> bool:
        """Whether a drafter was named, so that drafts do not come from the session."""
        return self.drafted_by is not None and self.drafted_by.address != ""

    @property
    def resumes_hints(self) -> bool:
        """A contradicted hint goes on behind the contradiction, until the next one comes."""
        return self.drafted_by is not None and self.drafted_by.resumes_hints

    @property
    def is_drafted_by_session(self) -> bool:
        """A hint for the current length is requested of its session."""
        return self.drafting and self.num_wanted_draft_tokens > 0 and not self.names_drafter

    @property
    def is_prefilling(self) -> bool:
        """More than the last token's K/V is missing."""
        return self.num_computed_tokens < len(self.token_ids) - 1

    @property
    def can_draft(self) -> bool:
        """A hint can be of use."""
        return self.num_speculative_tokens > 0 and self.remaining > 1

    @property
    def steps_only_with_hint(self) -> bool:
        """Under ALWAYS: the next token is decided together with the hint for this length."""
        return self.draft_wait is DraftWait.ALWAYS and self.can_draft and self.has_requested_hint

    @property
    def has_draft(self) -> bool:
        """A draft is buffered and can be of use."""
        return self.can_draft and bool(self.draft_buffer)

    @property
    def must_await_hint(self) -> bool:
        """Under ALWAYS: the hint for exactly the current length is not here yet."""
        return self.steps_only_with_hint and self._is_unanswered

    @property
    def may_await_hint(self) -> bool:
        """Under ADAPTIVE: there is no draft, and a hint may be under way."""
        return (
            self.num_wanted_draft_tokens > 0
            and not self.draft_buffer
            and self.draft_wait is DraftWait.ADAPTIVE
            and self.can_draft
            and self.has_requested_hint
            and self._is_unanswered
            and not self.is_prefilling
            and not (self.drafter is not None and self.drafter.is_overdue)
        )

    @property
    def has_requested_hint(self) -> bool:
        """A hint for the current length was requested, and can be expected."""
        if not self.num_wanted_draft_tokens:
            return False
        if self.drafter is not None:
            return self.drafter.is_answering
        return self.drafting and not self.names_drafter

    @property
    def _is_unanswered(self) -> bool:
        """No hint for the current length has come back."""
        return self.draft_buffer.answered_length < len(self.token_ids)
