"""Requests, events and results of a gateway's client, as plain values.

Owns `TandemError` too. Fields mean what `sampling.proto` and `gateway.proto` in
`protos/tandem/v1/` say. None leaves a field absent, so the server's default holds. Knows neither
gRPC channels nor protobuf (`tandem.wire` translates).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from tandem.values import (
    FinishReason,
    SamplingDefaults,
    SamplingParams,
    SpeculationParams,
    StepTrace,
    TokenLogprob,
    Usage,
)


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
class ReportedToken:
    """The text of one token of the output, and where the token comes from."""

    text: str
    """What became certain with it; empty while a character or a stop sequence is incomplete."""
    accepted: bool
    """Whether it was drafted and accepted; else the step of the model made it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """First event of a stream; again, before any output, only where another model begins anew."""

    request_id: str
    seed: int
    """The seed in use, also where the request has none."""
    num_prompt_tokens: int
    model_digest: str = ""
    """Of the model's weights and tokenizer; "" from a gateway that does not tell."""
    model_id: str = ""
    """Of the model that runs the request, also where this named an alias; "" as above."""


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
class Model:
    """A model that requests can name.

    Attributes:
        http_sampling_defaults: requests of this client do not get them; None: an older gateway.
        speculation_note: for people: what drafts brought the gateway's last requests, and if
            little, why; "": not known.
        alias_of: of an alias, the ids of its models, of which one runs a request; it has no digest.
    """

    model_id: str
    model_digest: str
    vocab_size: int
    max_model_len: int
    max_num_speculative_tokens: int
    num_verifiers: int
    http_sampling_defaults: SamplingDefaults | None = None
    speculation_note: str = ""
    alias_of: Sequence[str] = ()


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
