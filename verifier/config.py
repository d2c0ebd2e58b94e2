"""The verifier's configuration. Where the values come from is known to `servicekit.config`."""

import os
from pathlib import Path
from typing import Literal

import pydantic

from servicekit.config import ServerOptions

SERVICE = "verifier"


class VerifierConfig(
    pydantic.BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True
):
    """What `python -m verifier` runs with."""

    # Loopback only: any other address needs TLS or --allow-plaintext, which is the operator's say.
    server: ServerOptions = ServerOptions(listen="127.0.0.1:50052", metrics_listen="127.0.0.1:9102")

    model: Path
    """Checkpoint folder: config.json and safetensors."""

    model_id: str | None = None
    """Name that clients ask for; the folder's name if empty."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a GPU if there is one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and K/V; auto takes the checkpoint's, or float32 where the processor has no
    bfloat16 instructions."""

    numerics: Literal["auto", "strict", "fast"] = "auto"
    """strict: a token's logits have the same bits whatever else is in the batch; auto is strict on
    CPU and fast on GPU."""

    attention_backend: Literal["auto", "sdpa"] = "auto"
    """How attention over the paged K/V cache is computed."""

    threads: int = pydantic.Field(default=0, ge=0)
    """Threads of the model on CPU; 0 leaves one core to the rest of the machine."""

    max_model_len: int | None = pydantic.Field(default=None, ge=2)
    """Most tokens of a sequence, prompt and output; the model's own limit if empty."""

    max_num_seqs: int = pydantic.Field(default=64, ge=1)
    """Most sequences in a step; further ones wait."""

    max_num_waiting: int = pydantic.Field(default=1024, ge=1)
    """Most sequences waiting; further ones are refused with RESOURCE_EXHAUSTED."""

    max_num_batched_tokens: int = pydantic.Field(default=512, ge=1)
    """Most tokens in a step: prefill chunks, decodes and drafts alike."""

    max_num_speculative_tokens: int = pydantic.Field(default=31, ge=0)
    """Most drafts verified per sequence and step."""

    block_size: int = pydantic.Field(default=16, ge=1)
    """Tokens per K/V block."""

    num_kv_blocks: int | None = pydantic.Field(default=None, ge=1)
    """K/V blocks; if empty, enough for every sequence at full length, as far as memory allows."""

    kv_memory_fraction: float = pydantic.Field(default=0.25, gt=0, le=1)
    """Without --num-kv-blocks: most of the free memory of the device to take for K/V."""

    acceptance_rule: Literal["match", "ratio"] = "match"
    """How drafts are judged under sampling; match makes seeded output independent of drafts."""

    logprobs: bool = True
    """Whether requests may ask for logprobs."""

    max_logprobs: int = pydantic.Field(default=20, ge=0)
    """Most of the likeliest tokens whose logprobs a request may ask for."""

    draft_idle_timeout_s: float = pydantic.Field(default=30.0, gt=0)
    """Longest that a sequence opened with DRAFT_WAIT_ALWAYS waits for a draft, in seconds."""

    max_session_event_bytes: int = pydantic.Field(default=8 << 20, ge=1 << 16)
    """Most bytes of events that a session may leave unread before it is ended."""

    @pydantic.model_validator(mode="after")
    def _every_decode_fits_a_step(self) -> "VerifierConfig":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is under "
                f"--max-num-seqs {self.max_num_seqs}"
            )
        return self

    def num_threads(self) -> int:
        """Threads for the model: more than there are free cores stall each other badly."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) - 1)
