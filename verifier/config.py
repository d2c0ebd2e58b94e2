"""The verifier's configuration; `servicekit.config` reads it from flags, environment and file."""

import os
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from servicekit.address import parse_address
from servicekit.config import NO_FLAG, ChannelOptions, ServerOptions
from servicekit.cores import available_cores
from servicekit.gguf.folder import model_folder

SERVICE = "verifier"


class VerifierConfig(
    pydantic.BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True
):
    """What `python -m verifier` runs with."""

    # Loopback: any other address needs TLS or --allow-plaintext, which the operator must choose.
    server: ServerOptions = ServerOptions(listen="127.0.0.1:50052", metrics_listen="127.0.0.1:9102")

    peers: ChannelOptions = ChannelOptions()

    drafters: list[str] = []
    """Addresses of the drafters that gateways may name. Each admits itself, hosts below its name
    and, for a DNS name, every IP address that it resolves to, now or later: nothing is connected
    before. Without any, requests that name a drafter are refused."""

    draft_deadline_s: float = pydantic.Field(default=0.25, gt=0, allow_inf_nan=False)
    """How late a drafter may answer. One that stays later is put aside for a while: no step waits
    for it; at 40 times this, it counts as gone. In seconds."""

    drafter_idle_timeout_s: Annotated[float, NO_FLAG] = 60.0
    """How long a drafter that no sequence needs stays connected, in seconds."""

    model: Path
    """Checkpoint folder, with config.json and safetensors; or a GGUF file."""

    model_id: str | None = None
    """Name that clients ask for; the folder's name if empty."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto is a GPU if there is one."""

    tensor_parallel_size: int = pydantic.Field(default=1, ge=1)
    """Processes that share one model, each on its own device, started by
    `torchrun --nproc-per-node N -m verifier`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and K/V; auto is the checkpoint's. Where transformers computes on a CPU
    without instructions for that, auto is float32, which rounds nothing."""

    quantization: Literal["none", "fp8"] = "none"
    """The weights of linear layers in a byte each, half the memory of bfloat16, a little accuracy
    lost: fp8 holds them as 8-bit floats, by which a GPU also multiplies."""

    numerics: Literal["auto", "strict", "fast"] = "auto"
    """strict: a token's logits have the same bits whatever else is in the batch: Tandem's own
    decoder on a CPU, the decoder for GPUs with attention backend triton on a GPU; fast: on a GPU,
    or transformers computes; auto is strict where the own decoder serves the model on a CPU."""

    attention_backend: Literal["auto", "sdpa", "triton", "flash_attn"] = "auto"
    """How attention is computed on a GPU, and with transformers; auto is, on a GPU, the first of
    triton and flash_attn that is installed and can serve the model, else sdpa."""

    threads: int = pydantic.Field(default=0, ge=0, le=1024)
    """Threads of the model on CPU, in each process; 0: as many as the container's limit and the
    process's affinity allow, less one for the services beside it."""

    max_model_len: int | None = pydantic.Field(default=None, ge=2)
    """Largest length of a sequence in tokens, prompt and output; the model's limit if empty."""

    max_num_seqs: int = pydantic.Field(default=64, ge=1)
    """Largest number of sequences in a step; further ones wait."""

    max_num_waiting: Annotated[int, NO_FLAG] = 1024
    """Largest number of waiting sequences; further ones are refused with RESOURCE_EXHAUSTED. Those
    that go on with output that a verifier decided before are refused at twice this, and at twice
    `max_waiting_tokens`. A tenant that has less than its share of either finds room in any case."""

    max_waiting_tokens: Annotated[int, NO_FLAG] = 1 << 22
    """Largest number of tokens of all waiting sequences, unless only one waits; a token takes some
    40 bytes. Further sequences are refused with RESOURCE_EXHAUSTED."""

    max_num_batched_tokens: int = pydantic.Field(default=512, ge=1, le=1 << 20)
    """Largest number of tokens in a step: prefill chunks, decodes and drafts together."""

    max_num_speculative_tokens: int = pydantic.Field(default=31, ge=0, le=1 << 20)
    """Largest number of drafts verified per sequence and step."""

    speculation_depth: Literal["learned", "limits"] = "learned"
    """How many drafts a step verifies: learned chooses by what drafts cost and bring, both measured
    while serving; limits verifies all that the limits of the verifier, the request and the match
    allow, so that a repeated run does not depend on measured durations."""

    num_kv_blocks: int | None = pydantic.Field(default=None, ge=1)
    """K/V blocks; if empty, enough for every sequence at full length, as far as memory allows."""

    kv_memory_fraction: float | None = pydantic.Field(default=None, gt=0, le=1)
    """Without --num-kv-blocks: the part of free memory for K/V at most; if empty, 0.9 of what
    weights and the largest step leave on a GPU, else (on CPU, and of each of several GPUs) 0.25."""

    prefix_cache: bool = True
    """Whether K/V of equal prefixes is computed once, and kept while there is room."""

    logprobs: bool = True
    """Whether requests may ask for logprobs."""

    allow_trace: bool = False
    """Whether requests may ask for a trace of every step: what was computed, where, and from which
    proposals."""

    score: Literal["none", "drafts", "full"] = "drafts"
    """What callers may ask of Score: nothing, the scores of drafts, or also each position's
    distribution over the vocabulary and its hidden state, up to 4 MiB a call, from which they can
    learn much of the model's weights. Gateways do not need it; it also needs --logprobs."""

    allow_structured_output: bool = False
    """Whether requests may have the output follow a grammar of theirs. A hostile grammar can slow
    the steps of all requests: for clients that are trusted not to send one."""

    stall_timeout_s: Annotated[float, NO_FLAG] = 30.0
    """Longest duration of one step, or of having sequences without finishing a step, before
    liveness probes fail, in seconds."""

    @pydantic.field_validator("model")
    @classmethod
    def _stands_for_a_file(cls, value: Path) -> Path:
        return model_folder(value)

    @pydantic.field_validator("drafters")
    @classmethod
    def _are_addresses(cls, value: list[str]) -> list[str]:
        for address in value:
            parse_address(address)
        return value

    @pydantic.model_validator(mode="after")
    def _every_decode_fits_a_step(self) -> "VerifierConfig":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is under "
                f"--max-num-seqs {self.max_num_seqs}"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _the_own_decoder_is_one_process(self) -> "VerifierConfig":
        if self.numerics == "strict" and self.tensor_parallel_size > 1:
            raise ValueError(
                "--numerics strict is not offered with --tensor-parallel-size "
                f"{self.tensor_parallel_size}: transformers computes then"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _the_models_name_is_text(self) -> "VerifierConfig":
        # Names of files, and flags, may hold any bytes. Messages to gateways may not.
        try:
            self.served_model_id().encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"--model-id: the name {self.served_model_id()!r} is not text in UTF-8"
            ) from None
        return self

    def served_model_id(self) -> str:
        """The name that clients ask for."""
        return self.model_id or Path(os.path.realpath(self.model)).name

    def num_threads(self) -> int:
        """Threads for the model; more threads than free cores would stall each other."""
        free_cores = available_cores() - 1
        return self.threads or max(1, free_cores // self.tensor_parallel_size)
