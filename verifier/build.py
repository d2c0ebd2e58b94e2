"""Puts a verifier together: checkpoint, K/V cache, scheduler, engine. The only place that knows
all the parts.
"""

import hashlib
import platform
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from servicekit.config import ConfigError
from servicekit.logs import get_logger
from verifier.attention.selection import choose_attention, make_backend
from verifier.block_pool import BlockPool
from verifier.checkpoint import Checkpoint, load_checkpoint
from verifier.config import VerifierConfig
from verifier.engine import Engine, EngineObserver, EngineOptions, Observers
from verifier.kv_cache import KVCache
from verifier.numerics import BY_NAME, Numerics
from verifier.parity_probe import check_parity
from verifier.philox import exponential_noise
from verifier.rejection_sampler import AcceptanceRule
from verifier.scheduler import Scheduler
from verifier.target_model import TargetModel
from verifier.transformers_model import TransformersModel
from verifier.wire import ServedModel

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and what clients are told of it."""

    model: TargetModel
    served: ServedModel
    numerics: Numerics
    trash_slot: int


def load_model(config: VerifierConfig) -> LoadedModel:
    """Loads and checks the configured checkpoint. Takes as long as the weights take to read.

    Raises:
        CheckpointError: it cannot be served.
        ConfigError: the flags ask for more than there is.
    """
    device = torch.device(_device(config.device))
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads())
    checkpoint = load_checkpoint(
        config.model, dtype=config.dtype, device=device, quantization=config.quantization
    )
    numerics = BY_NAME[_numerics(config.numerics, device, checkpoint)]
    attention = choose_attention(
        config.attention_backend,
        block_size=config.block_size,
        device=device,
        dtype=checkpoint.dtype,
        head_dim=checkpoint.kv_shape.head_dim,
    )
    config = config.model_copy(update={"block_size": attention.block_size})
    num_kv_blocks = _num_kv_blocks(config, checkpoint, device)
    max_model_len = _max_model_len(config, checkpoint, num_kv_blocks)
    backend = make_backend(
        attention,
        numerics=numerics,
        dtype=checkpoint.dtype,
        device=device,
        max_model_len=max_model_len,
    )
    cache = KVCache(
        checkpoint.kv_shape,
        num_blocks=num_kv_blocks,
        block_size=config.block_size,
        device=device,
        layout=backend.kv_layout,
    )
    model = TransformersModel(checkpoint.model, backend=backend, cache=cache, device=device)
    check_parity(checkpoint, model, cache, numerics, max_model_len)
    served = ServedModel(
        model_id=config.model_id or config.model.resolve().name,
        model_digest=checkpoint.model_digest,
        numerics_digest=_numerics_digest(
            checkpoint.dtype, config.quantization, numerics, backend.name, device
        ),
        instance_id=secrets.token_hex(16),
        architecture=checkpoint.architecture,
        dtype=_dtype_name(checkpoint.dtype, config.quantization),
        device=device.type,
        numerics=numerics.name,
        attention_backend=backend.name,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_speculative_tokens=config.max_num_speculative_tokens,
        vocab_size=checkpoint.vocab_size,
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks,
        eos_token_ids=checkpoint.eos_token_ids,
        max_logprobs=config.max_logprobs if config.logprobs else None,
    )
    logger.info(
        "model loaded",
        architecture=served.architecture,
        dtype=served.dtype,
        device=served.device,
        numerics=served.numerics,
        threads=torch.get_num_threads(),
        max_model_len=max_model_len,
        num_kv_blocks=num_kv_blocks,
    )
    # Compiles the noise kernel.
    exponential_noise(
        np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64), np.ones((1, 1), dtype=np.bool_)
    )
    return LoadedModel(model=model, served=served, numerics=numerics, trash_slot=cache.trash_slot)


def build_engine(
    loaded: LoadedModel, config: VerifierConfig, observers: list[EngineObserver]
) -> Engine:
    """An engine for the model; not started."""
    observer = Observers(observers)
    served = loaded.served
    scheduler = Scheduler(
        block_pool=BlockPool(served.num_kv_blocks),
        block_size=served.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        count_hint=observer.hint_ended,
    )
    return Engine(
        model=loaded.model,
        scheduler=scheduler,
        options=EngineOptions(
            numerics=loaded.numerics,
            trash_slot=loaded.trash_slot,
            max_model_len=served.max_model_len,
            max_num_waiting=config.max_num_waiting,
            idle_timeout_s=config.draft_idle_timeout_s,
            acceptance_rule=AcceptanceRule(config.acceptance_rule),
        ),
        observer=observer,
    )


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cuda: no GPU is available to this torch build")
    return device


def _numerics(name: str, device: torch.device, checkpoint: Checkpoint) -> str:
    obstacle = None
    if device.type != "cpu":
        obstacle = "only known to hold on CPU so far"
    elif checkpoint.uses_experts:
        obstacle = (
            f"does not hold for mixtures of experts ({checkpoint.architecture}): which tokens "
            "share a product depends on the batch"
        )
    if name == "auto":
        return "strict" if obstacle is None else "fast"
    if name == "strict" and obstacle is not None:
        raise ConfigError("--numerics", f"strict: {obstacle}")
    return name


def _dtype_name(dtype: torch.dtype, quantization: str) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if quantization == "none" else f"{name}, {quantization} weights"


def _num_kv_blocks(config: VerifierConfig, checkpoint: Checkpoint, device: torch.device) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    longest = config.max_model_len or checkpoint.max_position_embeddings
    wanted = config.max_num_seqs * -(-longest // config.block_size)
    free_bytes = _free_bytes(device) * config.kv_memory_fraction
    affordable = int(free_bytes // checkpoint.kv_shape.block_bytes(config.block_size))
    if affordable < 1:
        raise ConfigError("--kv-memory-fraction", "leaves no memory for the K/V cache")
    return min(wanted, affordable)


def _max_model_len(config: VerifierConfig, checkpoint: Checkpoint, num_kv_blocks: int) -> int:
    """The longest sequence that the model, the flag and the K/V cache all allow."""
    room = num_kv_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > room:
        raise ConfigError(
            "--max-model-len", f"{config.max_model_len}: the K/V cache holds {room} tokens"
        )
    if (config.max_model_len or 0) > checkpoint.max_position_embeddings:
        raise ConfigError(
            "--max-model-len",
            f"{config.max_model_len}: the model's limit is {checkpoint.max_position_embeddings}",
        )
    return min(config.max_model_len or checkpoint.max_position_embeddings, room)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("--num-kv-blocks", "must be set: the free memory cannot be told here")


def _numerics_digest(
    dtype: torch.dtype,
    quantization: str,
    numerics: Numerics,
    attention_backend: str,
    device: torch.device,
) -> str:
    """Equal digests, with equal weights, mean equal bits; so all that decides them is in it."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_name()}"
    parts = (
        str(dtype),
        quantization,
        numerics.name,
        attention_backend,
        device.type,
        processor,
        torch.__version__,
        "tp=1",
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
