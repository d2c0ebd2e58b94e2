"""Requests, events and results of a gateway's client, as plain values.

Owns `TandemError` too. Fields mean what `sampling.proto` and `gateway.proto` in
`protos/tandem/v1/` say. None leaves a field absent, so the server's default holds. Knows neither
gRPC channels nor protobuf (`tandem.wire` translates).
"""

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import grpc


class FinishReason(enum.StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class DraftSource(enum.StrEnum):
    """Where a draft was copied from."""

    SEQUENCE = "sequence"
    POOL = "pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the text of the output must be: exactly one of these.

    Tokens that it forbids are never chosen. An output that ends early, by `max_new_tokens` or a
    stop, may be incomplete.
    """

    json_schema: str | Mapping[str, Any] | None = None
    """A JSON value that is valid under this schema."""
    regex: str | None = None
    """A text that matches all of this regular expression."""
    choices: Sequence[str] = ()
    """One of these strings."""
    lark: str | None = None
    """A text of this grammar, in the syntax of Lark; its first rule is `start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. The default is greedy, everything else off."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keeps the k most likely tokens; 0 keeps all."""
    top_p: float | None = None
    """Keeps the most likely tokens up to this cumulative probability, in (0, 1]."""
    min_p: float = 0.0
    """Keeps the tokens at least this many times as likely as the likeliest; 0 is off."""
    repetition_penalty: float | None = None
    """Over prompt and output; 1 is off."""
    frequency_penalty: float = 0.0
    """In [-2, 2], over the output; 0 is off."""
    presence_penalty: float = 0.0
    """In [-2, 2], over the output; 0 is off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids, each in [-100, 100]."""
    seed: int | None = None
    """Equal requests with equal seeds get equal output; None is random."""
    min_new_tokens: int = 0
    """No stop token comes before this many output tokens; a stop string that is complete before is
    text."""
    logprobs: int | None = None
    """Returns the logprob of each output token and of the n likeliest; None returns none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logprobs_mode: Literal["processed", "raw"] | None = None
    """Logprobs of the distribution that is sampled from, or of the model's own logits."""
    structured_output: StructuredOutput | None = None
    """The grammar that the output follows; None leaves it free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How drafts are made for a request. They change its speed, never its output."""

    enabled: bool | None = None
    preset: Literal["tandem", "vllm-kmp", "vllm", "transformers"] | None = None
    """Drafts as this known drafter does; the fields below override it. See docs/drafting.md."""
    num_speculative_tokens: int | None = None
    """Maximum number of drafts verified per step."""
    prompt_lookup_min: int | None = None
    """Shortest n-gram that is matched."""
    prompt_lookup_max: int | None = None
    """Longest n-gram that is matched."""
    overlap: Literal["disjoint", "allowed"] | None = None
    """Whether a match may overlap the n-gram at the end of the text."""
    tie: Literal["earliest", "latest", "longest"] | None = None
    """Which of several matches is continued."""
    tokens_per_match: int | None = None
    """With tie "longest": drafts verified per token of the match; 0 is no limit."""
    algorithm: Literal["index", "kmp"] | None = None
    """How matches are found; the drafts are the same."""
    hint_tokens: int | None = None
    """Maximum number of tokens that the drafter is asked for at a time."""
    pool: str = ""
    """Drafts from this shared pool of text too, and feeds it; "" is none."""
    pool_min_ngram: int | None = None
    """With tie "earliest" or "latest": asks the pool when the match in the request's own text is
    shorter than this; 0: only when there is none. With "longest" it is always asked."""
    pool_keep: Literal["nothing", "output", "all"] | None = None
    """Which part of the request's text its pool gets."""
    pool_keep_cancelled: bool = False
    """Whether the pool is fed also if the request is cancelled or fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request: a prompt as text or as token ids, and how to continue it."""

    prompt: str | Sequence[int]
    max_new_tokens: int | None = None
    """Maximum number of output tokens; None is up to the model's limit."""
    sampling: SamplingParams = SamplingParams()
    speculation: SpeculationParams = SpeculationParams()
    stop_sequences: Sequence[str] = ()
    """The output ends before the first of these in its text."""
    stop_token_ids: Sequence[int] = ()
    """The output ends after the first of these, and after the model's own end token."""
    ignore_eos: bool = False
    """Goes on after the model's own end token."""
    n: int | None = None
    """Number of independent choices; None is 1."""
    request_id: str = ""
    """For logs of both sides; "" lets the gateway make one."""
    model_id: str = ""
    """Which model; "" is the only one served."""
    output_token_ids: Sequence[int] = ()
    """Output received before a failure; the generation resumes behind it."""
    expected_model_digest: str = ""
    """The model that made `output_token_ids`, as `Started` tells it; "" is any."""
    affinity_key: str = ""
    """Requests with equal keys go to the same verifier while it has room."""
    priority: int = 0
    """Higher first."""
    trace: bool = False
    """Adds a `Traced` event for every step of the model; the servers must allow it."""
    report_tokens: bool = False
    """Adds `reported_tokens` to chunks: the text of each token, and whether it was drafted."""


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
class ReportedToken:
    """The text of one token of the output, and where the token comes from."""

    text: str
    """What became certain with it; empty while a character or a stop sequence is incomplete."""
    accepted: bool
    """Whether it was drafted and accepted; else the step of the model made it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchAcceptance:
    """Acceptance of the drafts whose match has one length."""

    matched_ngram_length: int
    """In tokens."""
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


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
class Started:
    """First event of a stream; again, before any output, only where another model begins anew."""

    request_id: str
    seed: int
    """The seed in use, also where the request has none."""
    num_prompt_tokens: int
    model_digest: str = ""
    """Of the model's weights and tokenizer; "" from a gateway that does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalTrace:
    """A drafter's proposal, as the verifier received it."""

    base_length: int
    """Length of the sequence that it continues, in tokens."""
    token_ids: tuple[int, ...]
    matched_ngram_length: int
    """How many tokens before the draft equal those before the place that it was copied from."""
    source: DraftSource | None


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
class Traced:
    """One step of one choice, sent before the chunk with its tokens if `trace` is set."""

    choice_index: int
    step: StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens of one choice."""

    choice_index: int
    offset: int
    """Output tokens of the choice before these."""
    token_ids: tuple[int, ...]
    text: str
    """Text that is certain: without incomplete characters and possible stop sequences."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int
    """Steps of the model that the chunk covers; more than 1 if the client reads slowly."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    """Why the choice ended, on its last chunk."""
    reported_tokens: tuple[ReportedToken, ...] = ()
    """One per token, if `report_tokens` is set; joined, their texts are `text`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Last event of one choice."""

    choice_index: int
    finish_reason: FinishReason
    usage: Usage


Event: TypeAlias = Started | Traced | Chunk | Finished
"""One event of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One whole continuation."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the first choice only: one per prompt token, the first of them empty (rank 0)."""
    reported_tokens: tuple[ReportedToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """All choices of a request, in order; the properties are those of the first."""

    request_id: str
    seed: int
    num_prompt_tokens: int
    choices: tuple[Choice, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.choices[0].usage


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """How a model is sampled where a request over HTTP does not say; `top_k` 0: from all tokens."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that requests can name.

    Attributes:
        http_sampling_defaults: requests of this client do not get them; None: an older gateway.
    """

    model_id: str
    model_digest: str
    vocab_size: int
    max_model_len: int
    max_num_speculative_tokens: int
    num_verifiers: int
    http_sampling_defaults: SamplingDefaults | None = None


class TandemError(Exception):
    """A request that failed, whether the server refused it or it could not be sent.

    Attributes:
        code: the canonical status, e.g. `grpc.StatusCode.INVALID_ARGUMENT`.
        message: one sentence for people.
        field: path of the offending field of the request, e.g. "sampling.top_p"; "" if none is.
        retry_after_s: when to retry, from an overloaded server; None without such advice.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        # An exception is rebuilt from its text otherwise: pools of processes pass errors on.
        rebuild = functools.partial(type(self), field=self.field, retry_after_s=self.retry_after_s)
        return rebuild, (self.code, self.message)


class EventCollector:
    """Joins the events of one stream into a `Generation`.

    Owned by the caller that reads the stream: it adds every event in order, then asks for the
    result once.
    """

    def __init__(self) -> None:
        self._started: Started | None = None
        self._chunks: dict[int, list[Chunk]] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case Chunk():
                self._chunks.setdefault(event.choice_index, []).append(event)
            case Finished():
                self._finished[event.choice_index] = event
            case Traced():
                pass  # not part of the result

    def generation(self) -> Generation:
        """The whole result.

        Raises:
            TandemError: INTERNAL, the stream ended early.
        """
        if self._started is None or not self._finished or self._chunks.keys() - self._finished:
            raise TandemError(grpc.StatusCode.INTERNAL, "the stream ended before it was finished")
        return Generation(
            request_id=self._started.request_id,
            seed=self._started.seed,
            num_prompt_tokens=self._started.num_prompt_tokens,
            choices=tuple(self._choice(index) for index in sorted(self._finished)),
        )

    def _choice(self, index: int) -> Choice:
        chunks = self._chunks.get(index, [])
        return Choice(
            token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            text="".join(chunk.text for chunk in chunks),
            finish_reason=self._finished[index].finish_reason,
            usage=self._finished[index].usage,
            logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
            prompt_logprobs=tuple(entry for chunk in chunks for entry in chunk.prompt_logprobs),
            reported_tokens=tuple(entry for chunk in chunks for entry in chunk.reported_tokens),
        )
