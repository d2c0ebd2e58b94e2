"""Messages to and from a verifier: commands; Welcome and events.

Owns the gateway's own form of them. `base_length` is always the number of tokens of the sequence
before the first one carried.

A decision per sequence and step comes in, so it is a named tuple: a frozen dataclass takes three
times as long to make.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from gateway.messages.request import AcceptedRequest
from gateway.messages.response import EncodedLogprob, EncodedStep
from tandem.values import DraftSource, DraftWait, FinishReason, Keep, SamplingParams, UndraftedSteps

# Commands


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenCommand:
    """Starts a sequence at a verifier.

    Attributes:
        token_ids: prompt, and on resume the output so far.
        request: all that the choices of a request have in common.
        sampling: the request's, except that only the first choice scores the prompt.
        num_speculative_tokens: the request's, or the verifier's limit if that is smaller.
        drafter: the address of the drafter that the verifier talks to; "": no drafts.
    """

    sequence_id: str
    token_ids: Sequence[int]
    request: AcceptedRequest
    sampling: SamplingParams
    seed: int
    num_speculative_tokens: int
    draft_wait: DraftWait
    drafter: str


class CloseCommand(NamedTuple):
    """Ends a sequence.

    Attributes:
        keep: which part of its text its pool keeps.
        keep_length: where that text ends; the verifier may be ahead.
    """

    sequence_id: str
    keep: Keep
    keep_length: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommandBatch:
    """One message to a verifier, in this order; Opens are added later, by their size.

    Attributes:
        updates: sequence id, and the address of its drafter from now on.
    """

    updates: Sequence[tuple[str, str]]
    closes: Sequence[CloseCommand]


# Welcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Which model a verifier serves, and its limits.

    Attributes:
        model_digest: verifiers with equal digests serve the same model, whatever its name.
        tokenizer_digest: "" if unknown.
        instance_id: of the verifier's process.
        numerics_digest: verifiers with equal ones continue a text with the same tokens; "" if it
            promises nothing.
        allows_trace: whether it traces the steps of requests that ask for it.
        max_step_tokens: the most tokens that one of its steps computes; 0 if unknown.
        num_kv_blocks: of its K/V cache; 0 if unknown.
    """

    model_id: str
    model_digest: str
    tokenizer_digest: str
    max_model_len: int
    max_num_speculative_tokens: int
    vocab_size: int
    instance_id: str = ""
    numerics_digest: str = ""
    allows_trace: bool = False
    max_step_tokens: int = 0
    num_kv_blocks: int = 0


# Events


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


class Decided(NamedTuple):
    """What one step decided for one sequence."""

    sequence_id: str
    base_length: int
    token_ids: list[int]
    num_draft_tokens: int
    num_accepted_tokens: int
    finish_reason: FinishReason | None
    logprobs: Sequence[EncodedLogprob] = ()
    matched_ngram_length: int = 0
    source: DraftSource | None = None
    undrafted: UndraftedSteps | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The sequence was refused, or failed; no event follows.

    Attributes:
        sequence_id: "" if the command named no sequence that the verifier knows.
        code: a google.rpc.Code number.
    """

    sequence_id: str
    code: int
    message: str
    field: str
    retry_after_ms: int


class DrafterState(enum.Enum):
    """Whether a verifier gets drafts from a drafter; see verifier.proto."""

    UP = "up"
    SLOW = "slow"
    DOWN = "down"
    IDLE = "idle"
    # The verifier may not talk to it: no event says so, but the rejection of an Open.
    REFUSED = "refused"


class DrafterStatus(NamedTuple):
    """The verifier reports on one of its drafters; an event of no sequence."""

    drafter: str
    state: DrafterState
    sequence_id: str = ""


class Draining(NamedTuple):
    """The verifier takes no more sequences; an event of no sequence."""

    sequence_id: str = ""


class UnreadableEvent(NamedTuple):
    """An event that this gateway cannot read.

    Attributes:
        sequence_id: "" if it names none.
    """

    sequence_id: str
    reason: str


VerifierEvent = (
    Opened
    | PromptScored
    | StepTraced
    | Decided
    | Rejected
    | DrafterStatus
    | Draining
    | UnreadableEvent
)
