"""What the gateway hears from verifiers and drafters, and what it tells them.

Owns the internal forms of the wire's messages. Knows no protobuf (`wire.py` converts).
`base_length` is always the number of tokens of the sequence before the first one carried.

The messages that every sequence brings at every step are named tuples, not frozen dataclasses:
they are made between a step's end and its next hint, 64 of each kind at a time, and a frozen
dataclass takes three times as long to make.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from gateway.messages.client import (
    EncodedLogprob,
    EncodedStep,
    FinishReason,
    Keep,
    NgramParams,
    SamplingParams,
)


class Decided(NamedTuple):
    """What one verifier step decided for one sequence."""

    sequence_id: str
    base_length: int
    token_ids: list[int]
    num_draft_tokens: int
    num_accepted_tokens: int
    num_wanted_draft_tokens: int
    finish_reason: FinishReason
    logprobs: Sequence[EncodedLogprob] = ()
    matched_ngram_length: int = 0
    source: int = 0


class Hint(NamedTuple):
    """A draft for the verifier: what may come after the first `base_length` tokens.

    Attributes:
        is_indexing: it is empty only because the drafter does not know the sequence well yet.
        source: the wire's number, known or not.
    """

    sequence_id: str
    base_length: int
    token_ids: list[int]
    matched_ngram_length: int
    is_indexing: bool = False
    source: int = 0


class ProposalStatus(enum.IntEnum):
    """How a drafter answered; the wire's numbers."""

    # And every number that this gateway does not know.
    UNSPECIFIED = 0
    OK = 1
    NO_MATCH = 2
    OUT_OF_SYNC = 3
    INVALID = 4
    INDEXING = 5


class Proposal(NamedTuple):
    """One drafter's answer to one delta."""

    status: ProposalStatus
    hint: Hint
    known_length: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewHistory:
    """What a drafter must know of a sequence once."""

    prompt_length: int
    ngram: NgramParams


class Delta(NamedTuple):
    """New tokens of one sequence for its drafter.

    Attributes:
        token_ids: a slice of the sequence's tokens; at most 8,192.
        max_draft_tokens: 0 appends only.
        creates: how the drafter shall make the sequence; None if it has it.
    """

    sequence_id: str
    base_length: int
    token_ids: list[int]
    max_draft_tokens: int
    max_length: int
    creates: NewHistory | None


class Release(NamedTuple):
    """A sequence that its drafter may forget.

    Attributes:
        keep: what of its text its pool gets.
        length: where that ends, if the drafter was sent more; else 0.
    """

    sequence_id: str
    keep: Keep = Keep.NOTHING
    length: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBatch:
    """One message to a drafter."""

    batch_id: int
    deltas: Sequence[Delta]
    releases: Sequence[Release]


class DraftWait(enum.Enum):
    """How long a verifier's step may wait for drafts."""

    ADAPTIVE = "adaptive"
    NEVER = "never"
    ALWAYS = "always"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenCommand:
    """Starts a sequence at a verifier.

    Attributes:
        token_ids: prompt, and on resume the output so far.
        max_new_tokens: counting the output in `token_ids`.
        drafting: whether hints may be expected.
        cache_salt: whose cached prefixes may be shared.
        priority: higher first.
        expected_model_digest: which model it was checked against; "": whichever.
        tokens_per_match: drafts verified per token that the match reaches back; 0: no such limit.
        trace: every step is to be told of.
    """

    sequence_id: str
    token_ids: Sequence[int]
    prompt_length: int
    sampling: SamplingParams
    seed: int
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    draft_wait: DraftWait
    drafting: bool
    num_speculative_tokens: int
    cache_salt: str = ""
    priority: int = 0
    expected_model_digest: str = ""
    tokens_per_match: int = 0
    trace: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommandBatch:
    """One message to a verifier, in this order, but for its Opens, which are sized one by one.

    Attributes:
        updates: sequence id to whether hints will come.
    """

    updates: Sequence[tuple[str, bool]]
    hints: Sequence[Hint]
    closes: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifierLimits:
    """What a verifier can take."""

    max_model_len: int
    max_num_seqs: int
    max_num_speculative_tokens: int
    vocab_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Who a verifier is.

    Attributes:
        model_digest: verifiers with equal ones serve the same model, whatever it is called.
        numerics_digest: among these, those with equal ones give the same bits.
        tokenizer_digest: "" if the verifier does not say.
    """

    instance_id: str
    model_id: str
    model_digest: str
    numerics_digest: str
    tokenizer_digest: str
    limits: VerifierLimits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The sequence was admitted to the verifier's batch."""

    sequence_id: str
    num_cached_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Logprobs of prompt tokens, from the one at `base_length` on; before the first `Decided`."""

    sequence_id: str
    base_length: int
    logprobs: Sequence[EncodedLogprob]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTraced:
    """What one step did with a sequence, before its `Decided`."""

    sequence_id: str
    step: EncodedStep


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The sequence was refused, or failed; nothing follows.

    Attributes:
        sequence_id: "" when the verifier could not tie the command to a sequence.
        code: a google.rpc.Code number.
    """

    sequence_id: str
    code: int
    message: str
    field: str
    retry_after_ms: int


class OddEvent(NamedTuple):
    """An event that this gateway cannot read.

    Attributes:
        sequence_id: "" if it is of no sequence.
    """

    sequence_id: str
    reason: str


VerifierEvent = Decided | Opened | PromptScored | StepTraced | Rejected | OddEvent
