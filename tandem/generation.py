"""What a client asks for and what it hears, as plain values.

Owns the client's vocabulary: requests, the events of a stream, results and `TandemError`. Fields
mean what `protos/tandem/v1/sampling.proto` and `gateway.proto` say; None is the wire's "absent", so
the server's default holds. Knows neither gRPC channels nor protobuf (`tandem.wire` translates).
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

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
class SamplingParams:
    """How tokens are chosen. The default is greedy, everything else off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_new_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["processed", "raw"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How this request is drafted for. It changes speed, never output."""

    enabled: bool | None = None
    # By the law of a known drafter, which the fields below change; docs/drafting.md has the table.
    preset: (
        Literal["tandem", "vllm-kmp", "vllm", "vllm-gpu", "transformers", "tensorrt-llm"] | None
    ) = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    overlap: Literal["disjoint", "allowed"] | None = None
    tie: Literal["earliest", "latest", "longest"] | None = None
    tokens_per_match: int | None = None
    algorithm: Literal["index", "kmp"] | None = None
    chained: bool | None = None
    hint_tokens: int | None = None
    pool: str = ""
    pool_min_ngram: int | None = None
    pool_keep: Literal["nothing", "output", "all"] | None = None
    pool_feed_tokens: int = 0
    pool_keep_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request: a prompt as text or as token ids, and how to continue it."""

    prompt: str | Sequence[int]
    max_new_tokens: int | None = None
    sampling: SamplingParams = SamplingParams()
    speculation: SpeculationParams = SpeculationParams()
    stop_sequences: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int | None = None
    request_id: str = ""
    model_id: str = ""
    output_token_ids: Sequence[int] = ()
    affinity_key: str = ""
    priority: int = 0
    trace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's natural logarithm of probability and rank (1: the likeliest)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchAcceptance:
    """What became of the drafts whose match reached equally far back, in tokens."""

    matched_ngram_length: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one choice cost, and how far speculation carried it."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    resumes: int = 0
    by_match_length: tuple[MatchAcceptance, ...] = ()
    num_sequence_drafts: int = 0
    num_pool_drafts: int = 0

    @property
    def num_steps_without_drafts(self) -> int:
        return self.num_steps - self.num_drafts

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted tokens that were accepted; None when none was verified."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per verifying step; None when no draft was verified."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def max_acceptance_length(self) -> int | None:
        """Most tokens of one verifying step; None when no draft was verified."""
        if not self.num_drafts:
            return None
        return 1 + sum(accepted > 0 for accepted in self.accepted_per_position)

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of the verifying steps in which the draft at each position was accepted."""
        return tuple(accepted / self.num_drafts for accepted in self.accepted_per_position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """First event of a stream."""

    request_id: str
    seed: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalTrace:
    """A drafter's proposal, as the verifier got it.

    Attributes:
        base_length: tokens of the sequence that it continues.
        matched_ngram_length: so many tokens before it are those before the place that it was
            copied from.
        source: where that place is.
    """

    base_length: int
    token_ids: tuple[int, ...]
    matched_ngram_length: int
    source: DraftSource | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What one step of the model did with one choice; see docs/data_flow.md.

    Attributes:
        input_token_ids, positions, slot_mapping: one of each per scheduled token.
        logits_indices: which of these gave logits, from 0.
        output_token_ids: the accepted drafts and one recovered or bonus token.
        context_length_after: in tokens, prompt and output.
        proposals: that came since the step before, in order.
    """

    step_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    input_token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    slot_mapping: tuple[int, ...]
    logits_indices: tuple[int, ...]
    draft_token_ids: tuple[int, ...]
    num_accepted_tokens: int
    output_token_ids: tuple[int, ...]
    context_length_after: int
    proposals: tuple[ProposalTrace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One step of one choice, before the chunk with its tokens; with `trace`."""

    choice_index: int
    step: StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens of one choice; `offset` output tokens of it came before."""

    choice_index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Last event of one choice."""

    choice_index: int
    finish_reason: FinishReason
    usage: Usage


Event: TypeAlias = Started | Traced | Chunk | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One whole continuation."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    # Of the first choice alone: one per prompt token, the first of them empty (rank 0).
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


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
class Model:
    """A model that can be asked for."""

    model_id: str
    model_digest: str
    vocab_size: int
    max_model_len: int
    max_num_speculative_tokens: int
    num_verifiers: int


class TandemError(Exception):
    """A request that failed, whether the server refused it or it could not be sent.

    Attributes:
        code: the canonical status, e.g. `grpc.StatusCode.INVALID_ARGUMENT`.
        message: one sentence for humans.
        field: the offending field of the request as a dotted path, e.g. "sampling.top_p"; empty
            when none was named.
        retry_after_s: the server's advice when it is overloaded; None without.
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


class EventCollector:
    """Joins the events of one stream into a `Generation`.

    Owned by the caller that reads the stream; feed it every event, in order, then ask once.
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
                pass  # no part of the result

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
        )
