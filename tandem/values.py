"""What requests can say, and what is said of their tokens: each of it declared once.

Owns the values that clients and services share. Fields mean what `sampling.proto`, `gateway.proto`
and `drafter.proto` say. Knows no service and no protobuf: `tandem.messages` converts.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.declared import MAX_UINT64, UINT32, Range, parameter

Overlap = Literal["disjoint", "allowed"]
Tie = Literal["earliest", "latest", "longest"]
Algorithm = Literal["index", "kmp"]
Preset = Literal["tandem", "vllm-kmp", "vllm", "transformers"]
KeptText = Literal["nothing", "output", "all"]
LogprobsMode = Literal["processed", "raw"]

#: The longest n-gram that is matched.
MAX_NGRAM = 32

_NGRAM = Range(1, MAX_NGRAM)
_PENALTY = Range(-2, 2)


class FinishReason(enum.StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class DraftSource(enum.StrEnum):
    """Where a draft was copied from."""

    SEQUENCE = "sequence"
    POOL = "pool"


class DraftWait(enum.StrEnum):
    """How long a verifier's step may wait for a sequence's drafts."""

    ADAPTIVE = "adaptive"  # while it pays
    NEVER = "never"
    ALWAYS = "always"  # until they come


class Keep(enum.StrEnum):
    """Which part of a sequence's text its pool gets when it ends."""

    NOTHING = "nothing"
    OUTPUT = "output"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """What may come before a structured output: any text up to the tag that ends it."""

    begin: str = ""
    """The tag that begins it; "" if the prompt has begun it."""
    end: str = ""
    """The tag that ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the text of the output must be: exactly one of the first four.

    Tokens that it forbids are never chosen. An output that ends early, by `max_new_tokens` or a
    stop, may be incomplete.
    """

    json_schema: str | Mapping[str, Any] | None = None
    """A JSON value that is valid under this schema."""
    regex: str | None = None
    """A text that matches all of this regular expression."""
    choices: Sequence[str] | None = None
    """One of these strings."""
    lark: str | None = None
    """A text of this grammar, in the syntax of Lark; its first rule is `start`."""
    reasoning: ReasoningTags | None = None
    """What may come before that text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. The default is greedy, everything else off."""

    temperature: float = parameter(
        0.0,
        Range(0),
        is_recommended=True,
        help="0 is greedy.",
    )
    top_k: int = parameter(
        0,
        UINT32,
        # So do other servers say that all tokens are kept.
        http_low=-1,
        is_extension=True,
        is_recommended=True,
        help="Sample from the k most likely tokens; 0: from all.",
    )
    top_p: float = parameter(
        1.0,
        Range(0, 1, is_above=True),
        is_recommended=True,
        help="Sample from the most likely tokens up to this cumulative probability.",
    )
    min_p: float = parameter(
        0.0,
        Range(0, 1),
        is_extension=True,
        is_recommended=True,
        help="Sample from the tokens at least this many times as likely as the likeliest; 0: off.",
    )
    repetition_penalty: float = parameter(
        1.0,
        # Beyond, logits would not be finite.
        Range(1e-6, 1e6),
        is_extension=True,
        is_recommended=True,
        help="Over prompt and output; 1: off.",
    )
    frequency_penalty: float = parameter(0.0, _PENALTY, help="Over the output; 0: off.")
    presence_penalty: float = parameter(0.0, _PENALTY, help="Over the output; 0: off.")
    logit_bias: Mapping[int, float] = parameter(
        {}, Range(-100, 100), help="Added to the logits of these token ids."
    )
    seed: int | None = parameter(
        None,
        Range(0, MAX_UINT64),
        # OpenAI's seeds may be negative.
        http_low=-(2**63),
        help="Equal requests with equal seeds get equal output; random by default.",
    )
    min_new_tokens: int = parameter(
        0,
        UINT32,
        http_name="min_tokens",
        is_extension=True,
        help="No stop token comes before this many output tokens; a stop string that is complete "
        "before is text.",
    )
    logprobs: int | None = parameter(
        None,
        UINT32,
        http_name="",
        help="Return the logprob of each output token and of the n likeliest; none by default.",
    )
    prompt_logprobs: int | None = parameter(
        None, UINT32, http_name="", help="The same for the tokens of the prompt."
    )
    logprobs_mode: LogprobsMode | None = parameter(
        None,
        http_name="",
        help="Logprobs of the distribution that is sampled from, which is the default, or of the "
        "model's own logits.",
    )
    structured_output: StructuredOutput | None = None
    """The grammar that the output follows; None leaves it free."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether penalties depend on the sequence's tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change before the temperature is applied."""
        return (
            self.counts_tokens
            or bool(self.logit_bias)
            or self.min_new_tokens > 0
            or self.structured_output is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How drafts are made for a request. They change its speed, never its output."""

    enabled: bool | None = parameter(
        None, help="Whether drafts are used at all; they are by default."
    )
    preset: Preset | None = parameter(
        None,
        help="Drafts as this known drafter makes them; the other parameters override it.",
    )
    num_speculative_tokens: int | None = parameter(
        None, UINT32, help="Most drafts verified per step."
    )
    prompt_lookup_min: int | None = parameter(None, _NGRAM, help="Shortest n-gram matched.")
    prompt_lookup_max: int | None = parameter(None, _NGRAM, help="Longest n-gram matched.")
    overlap: Overlap | None = parameter(
        None, help="Whether a match may overlap the n-gram at the end of the text."
    )
    tie: Tie | None = parameter(None, help="Which of several matches is continued.")
    tokens_per_match: int | None = parameter(
        None,
        UINT32,
        help="With the tie `longest`: drafts verified per token of the match; 0: no such limit.",
    )
    algorithm: Algorithm | None = parameter(
        None, help="How matches are found; the drafts are the same."
    )
    hint_tokens: int | None = parameter(
        None, UINT32, help="Most draft tokens requested from the drafter at a time."
    )
    prediction: str = parameter(
        "",
        help="Text that the output may repeat, such as a file to be edited: drafts are taken from "
        "it, too.",
    )
    pool: str = parameter("", help="The tenant's pool to draft from too, and to feed.")
    pool_min_ngram: int | None = parameter(
        None,
        UINT32,
        help="With the tie `earliest` or `latest`: the pool is searched when the request's own "
        "match is shorter than this; 0: only when there is none. With `longest` it is always "
        "searched.",
    )
    pool_keep: KeptText | None = parameter(
        None, help="Which part of the request's text its pool gets."
    )
    pool_keep_cancelled: bool = parameter(
        False, help="Whether the pool gets the text of a request that is cancelled or fails, too."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramParams:
    """Which n-grams are matched, where, and which match is continued."""

    min_ngram: int | None = None
    """Shortest n-gram that is matched."""
    max_ngram: int | None = None
    """Longest n-gram that is matched."""
    overlap: Overlap | None = None
    """Whether a match may overlap the n-gram at the end of the text."""
    tie: Tie | None = None
    """Which of several matches is continued."""
    tokens_per_match: int | None = None
    """With tie "longest": maximum draft tokens per token of the match; 0 is no limit."""
    algorithm: Algorithm | None = None
    """How matches are found; the drafts are the same."""
    pool_id: str = ""
    """Drafts from this shared pool of text too; "" is none."""
    pool_min_ngram: int = 0
    """With tie "earliest" or "latest": asks the pool when the match in the sequence's own text is
    shorter than this; 0: only when there is none. With "longest" it is always asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token, the natural logarithm of its probability, and its rank."""

    token_id: int
    logprob: float
    rank: int
    """1 is the likeliest."""
    top: tuple["TokenLogprob", ...] = ()
    """The n likeliest tokens, in order of rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchAcceptance:
    """Acceptance of the drafts whose match has one length."""

    matched_ngram_length: int
    """In tokens."""
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UndraftedSteps:
    """Steps that decoded a choice without drafts although it may have some, by reason."""

    no_match: int = 0
    """Nothing that repeats was found."""
    late: int = 0
    """No drafter had answered."""
    declined: int = 0
    """Drafts were not worth what their rows cost."""
    forbidden: int = 0
    """By the output's grammar."""
    limited: int = 0
    """No room: by the output's length, a stop token, the step or K/V blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The cost of one choice, and the part that drafts had in it."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose K/V came from the prefix cache."""
    num_steps: int = 0
    """Steps of the model."""
    num_drafts: int = 0
    """Steps that verified drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Without the recovered or bonus token of each step."""
    accepted_per_position: tuple[int, ...] = ()
    """Element j: how often the draft at position j was accepted."""
    resumes: int = 0
    """How often the request moved to another verifier, or was resumed by the client."""
    by_match_length: tuple[MatchAcceptance, ...] = ()
    """In ascending order of length."""
    num_sequence_drafts: int = 0
    """Of `num_drafts`, those copied from the request's own tokens."""
    num_pool_drafts: int = 0
    """Of `num_drafts`, those copied from a pool."""
    undrafted: UndraftedSteps | None = None
    """At the verifier that ended the choice; None where a stop string or a cancel ended it."""

    @property
    def num_steps_without_drafts(self) -> int:
        return self.num_steps - self.num_drafts

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted; None when there was none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Output tokens per step with drafts; None when there was none."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def max_acceptance_length(self) -> int | None:
        """Maximum output tokens of a step with drafts; None when there was none."""
        if not self.num_drafts:
            return None
        return 1 + sum(accepted > 0 for accepted in self.accepted_per_position)

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of the steps with drafts in which the draft at each position was accepted."""
        return tuple(accepted / self.num_drafts for accepted in self.accepted_per_position)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalTrace:
    """A drafter's proposal, as the verifier received it."""

    base_length: int
    """Length of the sequence that it continues, in tokens."""
    token_ids: tuple[int, ...]
    matched_ngram_length: int
    """How many tokens before the draft equal those before the place that it was copied from."""
    source: DraftSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What one step of the model did with one choice; see docs/data_flow.md."""

    step_id: int
    num_computed_tokens: int
    """Tokens whose K/V existed before the step."""
    num_scheduled_tokens: int
    """Tokens that the step computed, drafts included."""
    input_token_ids: tuple[int, ...]
    """One per scheduled token, as `positions` and `slot_mapping`."""
    positions: tuple[int, ...]
    slot_mapping: tuple[int, ...]
    logits_indices: tuple[int, ...]
    """The scheduled tokens that logits were computed for, counted from 0."""
    draft_token_ids: tuple[int, ...]
    num_accepted_tokens: int
    output_token_ids: tuple[int, ...]
    """The accepted drafts and one recovered or bonus token."""
    context_length_after: int
    """Tokens of prompt and output after the step."""
    proposals: tuple[ProposalTrace, ...]
    """Those that arrived since the previous step, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What requests over HTTP get that name no value: what a model's folder recommends, else
    OpenAI's defaults.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: tokens are sampled from all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
