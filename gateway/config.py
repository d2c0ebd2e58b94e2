"""The gateway's configuration. Where the values come from is known to `servicekit.config`."""

from pathlib import Path
from typing import Literal

import pydantic

from gateway.request import Tie
from gateway.validation import DEFAULT_TOKENS_PER_MATCH, MAX_NGRAM, RequestDefaults
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

    num_speculative_tokens: int | None = pydantic.Field(default=None, ge=0)
    """Most drafts verified per step for requests that do not say; at most the verifiers' limit.
    If empty: that limit where a draft's length follows its match, else 7."""

    prompt_lookup_min: int = pydantic.Field(default=2, ge=1, le=MAX_NGRAM)
    """Shortest n-gram matched for requests that do not say."""

    prompt_lookup_max: int = pydantic.Field(default=5, ge=1, le=MAX_NGRAM)
    """Longest n-gram matched for requests that do not say."""

    tie: Literal["earliest", "latest", "longest"] = "longest"
    """Which of several matches is continued for requests that do not say."""

    tokens_per_match: int = pydantic.Field(default=DEFAULT_TOKENS_PER_MATCH, ge=0)
    """With ties by the longest match: drafts verified per token that the match reaches back, for
    requests that do not say; 0 for no such limit."""

    max_prompt_tokens: int | None = pydantic.Field(default=None, ge=1)
    """Longest prompt taken; the model's limit if empty."""

    max_concurrent_requests: int = pydantic.Field(default=1024, ge=1)
    """Most requests at a time, each choice counting as one; further ones are turned away."""

    max_waiting_tokens: int = pydantic.Field(default=2_097_152, ge=1)
    """Most prompt tokens that wait for their first output token at a time, counted for each choice;
    further requests are turned away, unless nothing waits beside them."""

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
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"--prompt-lookup-min {self.prompt_lookup_min} is over "
                f"--prompt-lookup-max {self.prompt_lookup_max}"
            )
        return self

    def request_defaults(self) -> RequestDefaults:
        """What requests leave open."""
        return RequestDefaults(
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_min=self.prompt_lookup_min,
            prompt_lookup_max=self.prompt_lookup_max,
            tie=Tie[self.tie.upper()],
            tokens_per_match=self.tokens_per_match,
            max_prompt_tokens=self.max_prompt_tokens,
        )
