"""The gateway's configuration. Where the values come from is known to `servicekit.config`."""

from pathlib import Path
from typing import Literal

import pydantic

from gateway.messages.request import Algorithm, Overlap, Tie
from gateway.messages.sizes import MAX_UINT32
from gateway.requests.drafting_policy import LAWS, DraftingLaw, Preset
from gateway.requests.validation import MAX_NGRAM, RequestDefaults
from servicekit.address import parse_address
from servicekit.config import ChannelOptions, ServerOptions

SERVICE = "gateway"


class GatewayConfig(pydantic.BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What `python -m gateway` runs with."""

    server: ServerOptions = ServerOptions(listen="127.0.0.1:50050", metrics_listen="127.0.0.1:9100")

    peers: ChannelOptions = ChannelOptions()

    http_listen: str | None = "127.0.0.1:8000"
    """Address to serve HTTP on (/metrics, /health), HOST:PORT; none if empty. It speaks TLS with
    --tls-cert, and plaintext beyond loopback only with --allow-plaintext, as --listen does."""

    verifiers: list[str] = pydantic.Field(min_length=1)
    """Addresses of the verifiers."""

    drafters: list[str] = []
    """Addresses of the drafters; without any, nothing is drafted."""

    tokenizer: Path | None = None
    """Folder of the model, for its tokenizer.json; without it, token ids in and token ids out."""

    draft_wait: Literal["adaptive", "never", "always"] = "adaptive"
    """How long a verifier's step may wait for drafts: while it pays, not at all, or always (for
    tests: the steps are then the same every time)."""

    hint_tokens: int = pydantic.Field(default=64, ge=1, le=512)
    """Most draft tokens asked for at a time: two steps' worth, so that a step whose drafts were all
    accepted leaves the next one its drafts."""

    preset: Literal["tandem", "vllm-kmp", "vllm", "vllm-gpu", "transformers", "tensorrt-llm"] = (
        "tandem"
    )
    """The known drafter by whose law requests are drafted for that name none (docs/drafting.md has
    the table). The flags below change single values of it; a request that names a preset gets that
    one as it is."""

    num_speculative_tokens: int | None = pydantic.Field(default=None, ge=0)
    """Most drafts verified per step; at most the verifiers' limit. If empty: the preset's (tandem:
    that limit where a draft's length follows its match, else 7)."""

    prompt_lookup_min: int | None = pydantic.Field(default=None, ge=1, le=MAX_NGRAM)
    """Shortest n-gram matched; the preset's if empty."""

    prompt_lookup_max: int | None = pydantic.Field(default=None, ge=1, le=MAX_NGRAM)
    """Longest n-gram matched; the preset's if empty."""

    overlap: Literal["disjoint", "allowed"] | None = None
    """Whether a match may overlap the n-gram at the end; the preset's if empty."""

    tie: Literal["earliest", "latest", "longest"] | None = None
    """Which of several matches is continued; the preset's if empty."""

    tokens_per_match: int | None = pydantic.Field(default=None, ge=0, le=MAX_UINT32)
    """With ties by the longest match: drafts verified per token that the match reaches back; 0 for
    no such limit; 2 if empty."""

    algorithm: Literal["index", "kmp"] | None = None
    """How matches are found, by a hash index or by a Knuth-Morris-Pratt scan: the drafts are the
    same. The preset's if empty."""

    chained: bool = False
    """Whether a draft goes on past the end of the known text by matching again."""

    pool_min_ngram: int = pydantic.Field(default=0, ge=0, le=MAX_UINT32)
    """A request's pool is asked when its own match reaches less far; 0: when there is none."""

    max_prompt_tokens: int | None = pydantic.Field(default=None, ge=1)
    """Longest prompt taken; the model's limit if empty."""

    max_concurrent_requests: int = pydantic.Field(default=1024, ge=1)
    """Most requests at a time, each choice counting as one; further ones are turned away."""

    max_waiting_tokens: int = pydantic.Field(default=2_097_152, ge=1)
    """Most prompt tokens that wait for their first output token at a time, counted for each choice;
    further requests are turned away, unless nothing waits beside them."""

    allow_trace: bool = False
    """Whether requests may ask to be told of every step of the model; the verifiers must allow it,
    too."""

    unread_timeout_s: float = pydantic.Field(default=60.0, gt=0, allow_inf_nan=False)
    """How long a client may leave output unread, so that no more can be sent, before its request is
    ended, in seconds."""

    draft_deadline_s: float = pydantic.Field(default=0.25, gt=0, allow_inf_nan=False)
    """How late a drafter may answer before nobody waits for it until it has caught up, in seconds;
    40 times as late, it counts as gone."""

    client_delay_s: float = pydantic.Field(default=0.003, ge=0, allow_inf_nan=False)
    """How long tokens may wait for hints to be forwarded first, in seconds."""

    connect_timeout_s: float = pydantic.Field(default=5.0, gt=0, allow_inf_nan=False)
    """How long one attempt to reach a drafter or verifier may take, in seconds."""

    progress_timeout_s: float = pydantic.Field(default=120.0, gt=0, allow_inf_nan=False)
    """How long a verifier that has sequences may tell nothing of any and make no step, before their
    streams end with UNAVAILABLE, in seconds."""

    @pydantic.field_validator("http_listen")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            parse_address(value)
        return value

    @pydantic.field_validator("verifiers", "drafters")
    @classmethod
    def _are_distinct(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("an address is there twice")
        return value

    @pydantic.model_validator(mode="after")
    def _ngrams_are_a_range(self) -> "GatewayConfig":
        law = self.drafting_law()
        if law.min_ngram > law.max_ngram:
            raise ValueError(
                f"--prompt-lookup-min {law.min_ngram} is over --prompt-lookup-max {law.max_ngram}"
            )
        if self.tokens_per_match and law.tie is not Tie.LONGEST:
            raise ValueError("--tokens-per-match counts with --tie longest only")
        return self

    def drafting_law(self) -> DraftingLaw:
        """By which requests are drafted for that name no preset."""
        return LAWS[Preset[self.preset.replace("-", "_").upper()]].changed(
            min_ngram=self.prompt_lookup_min,
            max_ngram=self.prompt_lookup_max,
            overlap=Overlap[self.overlap.upper()] if self.overlap else None,
            tie=Tie[self.tie.upper()] if self.tie else None,
            tokens_per_match=self.tokens_per_match,
            algorithm=Algorithm[self.algorithm.upper()] if self.algorithm else None,
            chained=self.chained,
            pool_min_ngram=self.pool_min_ngram,
            num_speculative_tokens=self.num_speculative_tokens,
        )

    def request_defaults(self) -> RequestDefaults:
        """What requests leave open."""
        return RequestDefaults(
            law=self.drafting_law(),
            hint_tokens=self.hint_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
        )
