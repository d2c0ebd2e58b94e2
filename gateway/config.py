"""The gateway's configuration. `servicekit.config` knows where the values come from."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from gateway.messages.sizes import MAX_DRAFTER_ADDRESS_BYTES
from gateway.requests.acceptance import RequestDefaults
from gateway.requests.drafting_policy import TANDEM
from gateway.routing.aliases import parse_aliases
from servicekit.address import parse_address
from servicekit.config import NO_FLAG, ChannelOptions, ServerOptions
from servicekit.gguf.folder import model_folder

SERVICE = "gateway"

# As a browser sends it: it is compared as it is. Only of http and https is the host in lower case.
_ORIGIN = re.compile(
    r"(?:(?P<http>https?)|[a-z][a-z0-9+.-]*)"
    r"://(?P<host>[A-Za-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>[1-9][0-9]*))?"
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class GatewayConfig(pydantic.BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The options of `python -m gateway`."""

    server: ServerOptions = ServerOptions(listen="127.0.0.1:50050", metrics_listen="127.0.0.1:9100")

    peers: ChannelOptions = ChannelOptions()

    http_listen: str | None = "127.0.0.1:8000"
    """Address to serve HTTP on (the OpenAI API, /metrics, /health), HOST:PORT; none if empty. It
    speaks TLS with --tls-cert, and plaintext beyond loopback only with --allow-plaintext, as
    --listen does."""

    http_allowed_origins: list[str] = []
    """Origins whose pages may call the HTTP port from a browser, https://chat.example or
    http://localhost:3000 each, or `*` for all (docs/openai.md). If empty, no page but the gateway's
    own."""

    page: bool = True
    """Whether the HTTP port has a page at / that shows answers with and without speculation
    (docs/page.md). It calls the API with the rights of its user."""

    clients: Path | None = None
    """YAML file with the clients that may call, by token or certificate, their tenants and quotas
    (docs/security.md); a change counts within seconds. If empty, whoever reaches the port may call,
    as one tenant."""

    metrics_need_token: bool = False
    """Whether /metrics on the HTTP port is for the clients of --clients only, as /v1 is. The
    metrics port answers without a token."""

    verifiers: list[str] = pydantic.Field(min_length=1)
    """Addresses of the verifiers, HOST:PORT each. A DNS name stands for as many verifiers as it has
    addresses."""

    drafters: list[str] = []
    """Addresses of the drafters, HOST:PORT each, that the verifiers are told to talk to; each
    verifier's own --drafters must admit them. A DNS name stands for as many drafters as it has
    addresses. Without any, nothing is drafted."""

    tokenizer: list[Path] = []
    """Folders of models, for their tokenizer.json and chat template, or GGUF files: each serves the
    models whose verifiers report the same tokenizer. Requests and responses of other models hold
    token ids only. The only one also serves models whose verifiers report none."""

    model_aliases: list[str] = []
    """Names that stand for several models, NAME=ID:WEIGHT each; the entries of one name share its
    requests by their weights. Requests with one affinity key, or one beginning of their prompts, go
    to one model. A name may be a model's own, and have that among its models (docs/deploy.md)."""

    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "hermes_list",
        "llama3_json",
        "pythonic",
        "qwen3_xml",
        "glm45",
        "mistral",
        "deepseek_v3",
        "gemma4",
        "kimi_k2",
        "granite",
        "olmo3",
    ] = "auto"
    """The form in which models write tool calls, of those in docs/openai.md; `auto`, as each
    model's chat template says; with `none` calls stay text."""

    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """How models write their reasoning before a chat's answer: `think`, in <think> tags; `auto`,
    if the model's chat template knows these; with `none` it stays text."""

    generation_config: Literal["auto", "none"] = "auto"
    """Which sampling requests over HTTP get that name none: `auto`, what the generation_config.json
    beside each tokenizer says (temperature, top_p, top_k, min_p, repetition_penalty), else OpenAI's
    defaults; with `none` always these. Over gRPC the defaults are the same for every model."""

    draft_wait: Literal["adaptive", "never", "always"] = "adaptive"
    """How long a verifier's step may wait for drafts: while it pays, not at all, or always (for
    tests: the steps are then the same every time)."""

    hint_tokens: int = pydantic.Field(default=64, ge=1, le=512)
    """Most draft tokens requested from a drafter at a time: for two steps, so that a step whose
    drafts were all accepted leaves drafts for the next one."""

    num_speculative_tokens: int | None = pydantic.Field(default=None, ge=0)
    """Most drafts verified per step; at most the verifiers' limit. If empty: that limit where
    the number of drafts follows the match, else 7."""

    default_pool: str = pydantic.Field(default="", pattern=r"^[!-~]{0,128}$")
    """Pool, of each tenant its own, of requests that name neither a pool nor a preset: they draft
    from their tenant's earlier answers, and leave it theirs (docs/security.md). If empty, none."""

    max_prompt_tokens: int | None = pydantic.Field(default=None, ge=1)
    """Longest prompt accepted, in tokens; the model's limit if empty."""

    max_concurrent_requests: int = pydantic.Field(default=1024, ge=1)
    """Most requests at a time, counting each choice as one; further ones are refused. With
    --clients, one tenant gets four fifths at most, and where several models are served, one
    model."""

    max_waiting_tokens: Annotated[int, NO_FLAG] = 2_097_152
    """Most prompt tokens that wait for their first output token at a time, counted for each choice;
    further requests are refused, unless no other waits."""

    allow_trace: bool = False
    """Whether requests may ask for a trace of every step of the model; the verifiers must allow
    it, too."""

    stream_interval_s: Annotated[float, NO_FLAG] = 0.005
    """For how long a stream's tokens are gathered for one message, in seconds; with many streams
    for longer. The first and the last tokens never wait. 0: a message for each step of the
    model."""

    unread_timeout_s: Annotated[float, NO_FLAG] = 60.0
    """How long a client may leave output unread, so that no more can be sent, before its request is
    ended, in seconds."""

    connect_timeout_s: Annotated[float, NO_FLAG] = 5.0
    """How long one attempt to reach a verifier may take, in seconds."""

    failover_after_s: Annotated[float, NO_FLAG] = 1.5
    """How long a verifier may not answer, or its engine not step, before its sequences go on at
    another one, in seconds. A step may take twice as long as the longest of the last ones."""

    progress_timeout_s: Annotated[float, NO_FLAG] = 120.0
    """The same where there is no other verifier; the session is then begun anew, in seconds."""

    resume_timeout_s: Annotated[float, NO_FLAG] = 10.0
    """How long a request whose verifier is gone may wait for one that goes on with it, before it
    ends with UNAVAILABLE, in seconds."""

    max_resumes: Annotated[int, NO_FLAG] = 4
    """How often a choice may go on at another verifier after it lost its own. Verifiers that shut
    down do not count."""

    @pydantic.field_validator("tokenizer", mode="before")
    @classmethod
    def _are_folders(cls, value: object) -> object:
        # One folder stands for a list of one, null for none.
        if value is None:
            return []
        return [value] if isinstance(value, str | Path) else value

    @pydantic.field_validator("tokenizer")
    @classmethod
    def _stand_for_files(cls, value: list[Path]) -> list[Path]:
        return [model_folder(each) for each in value]

    @pydantic.field_validator("http_listen")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            parse_address(value)
        return value

    @pydantic.field_validator("http_allowed_origins")
    @classmethod
    def _are_origins(cls, value: list[str]) -> list[str]:
        if value != ["*"]:
            for origin in value:
                _check_origin(origin)
        return value

    @pydantic.field_validator("model_aliases")
    @classmethod
    def _are_aliases(cls, value: list[str]) -> list[str]:
        parse_aliases(value)
        return value

    @pydantic.field_validator("verifiers", "drafters")
    @classmethod
    def _are_distinct_addresses(cls, value: list[str]) -> list[str]:
        for address in value:
            parse_address(address)
        if len(set(value)) < len(value):
            raise ValueError("an address is given twice")
        return value

    @pydantic.field_validator("drafters")
    @classmethod
    def _fit_messages(cls, value: list[str]) -> list[str]:
        if any(len(address.encode()) > MAX_DRAFTER_ADDRESS_BYTES for address in value):
            raise ValueError(f"an address has over {MAX_DRAFTER_ADDRESS_BYTES} bytes")
        return value

    @pydantic.model_validator(mode="after")
    def _tokens_are_known(self) -> "GatewayConfig":
        if self.metrics_need_token and self.clients is None:
            raise ValueError("--metrics-need-token needs --clients")
        return self

    def request_defaults(self) -> RequestDefaults:
        """Values that requests leave open, and the gateway's own limits."""
        return RequestDefaults(
            drafting=dataclasses.replace(
                TANDEM, num_speculative_tokens=self.num_speculative_tokens
            ),
            hint_tokens=self.hint_tokens,
            pool=self.default_pool,
            max_prompt_tokens=self.max_prompt_tokens,
        )


def _check_origin(text: str) -> None:
    origin = _ORIGIN.fullmatch(text)
    if origin is not None:
        scheme, host, port = origin["http"], origin["host"], origin["port"]
        if scheme is None or (host == host.lower() and port != _DEFAULT_PORTS[scheme]):
            return
    raise ValueError(
        f"{text!r} is no origin as browsers send it: SCHEME://HOST or SCHEME://HOST:PORT, in lower "
        "case, without path and default port; `*` for all stands alone"
    )
