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
from verifier.attention.sdpa import SdpaBackend
from verifier.batch_layout import ScheduledTokens, lay_out
from verifier.block_pool import BlockPool
from verifier.checkpoint import Checkpoint, CheckpointError, load_checkpoint, reference_logits
from verifier.config import VerifierConfig
from verifier.engine import Engine, EngineObserver, EngineOptions, Observers
from verifier.kv_cache import KVCache
from verifier.numerics import BY_NAME, Numerics
from verifier.philox import exponential_noise
from verifier.rejection_sampler import AcceptanceRule
from verifier.scheduler import Scheduler
from verifier.scored_rows import max_rows_per_step
from verifier.target_model import TargetModel
from verifier.transformers_model import TransformersModel, UnsupportedAttentionError
from verifier.wire import ServedModel

logger = get_logger(__name__)

# Largest difference of two ways to compute the same logits, relative to the largest logit.
_PARITY_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
_PARITY_TOKENS = 48


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
    numerics = BY_NAME[_numerics(config.numerics, device)]
    checkpoint = load_checkpoint(config.model, dtype=config.dtype, device=device)
    num_kv_blocks = _num_kv_blocks(config, checkpoint, device)
    max_model_len = _max_model_len(config, checkpoint, num_kv_blocks)
    cache = KVCache(
        checkpoint.kv_shape,
        num_blocks=num_kv_blocks,
        block_size=config.block_size,
        device=device,
    )
    backend = SdpaBackend(
        numerics=numerics, dtype=checkpoint.dtype, device=device, max_model_len=max_model_len
    )
    model = TransformersModel(checkpoint.model, backend=backend, cache=cache, device=device)
    _check_parity(checkpoint, model, cache, numerics, max_model_len)
    served = ServedModel(
        model_id=config.model_id or config.model.resolve().name,
        model_digest=checkpoint.model_digest,
        numerics_digest=_numerics_digest(checkpoint.dtype, numerics, device),
        instance_id=secrets.token_hex(16),
        architecture=checkpoint.architecture,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
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
        has_prefix_cache=config.prefix_cache,
        max_scored_rows=max_rows_per_step(
            vocab_size=served.vocab_size, max_logprobs=served.max_logprobs or 0
        ),
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


def _numerics(name: str, device: torch.device) -> str:
    if name != "auto":
        if name == "strict" and device.type != "cpu":
            raise ConfigError("--numerics", "strict: only known to hold on CPU so far")
        return name
    return "strict" if device.type == "cpu" else "fast"


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


def _check_parity(
    checkpoint: Checkpoint,
    model: TargetModel,
    cache: KVCache,
    numerics: Numerics,
    max_model_len: int,
) -> None:
    """Compares the paged model with transformers' own attention on a short text, in two chunks.

    Raises:
        CheckpointError: they differ by more than rounding, or ours cannot compute it at all.
    """
    num_tokens = min(_PARITY_TOKENS, max_model_len)
    token_ids = [(37 * i + 11) % checkpoint.vocab_size for i in range(num_tokens)]
    first = num_tokens // 2
    layouts = []
    for start, end in ((0, first), (first, num_tokens)):
        layouts.append(
            lay_out(
                [
                    ScheduledTokens(
                        token_ids=token_ids[start : start + 1],
                        draft_token_ids=token_ids[start + 1 : end],
                        num_computed_tokens=start,
                        block_table=list(range(-(-end // cache.block_size))),
                    )
                ],
                block_size=cache.block_size,
                trash_slot=cache.trash_slot,
                row_multiple=numerics.row_multiple,
            )
        )
    try:
        rows = torch.cat([model.forward(layout) for layout in layouts])
        expected = reference_logits(checkpoint.model, token_ids)
    except (RuntimeError, ValueError, UnsupportedAttentionError) as error:
        raise CheckpointError(f"{checkpoint.architecture} is not served: {error}") from error
    difference = (rows.float() - expected.float()).abs().max().item()
    largest = expected.float().abs().max().item()
    tolerance = _PARITY_TOLERANCES[checkpoint.dtype]
    if not difference <= tolerance * max(1.0, largest):
        raise CheckpointError(
            f"{checkpoint.architecture} is not computed as transformers computes it: logits "
            f"differ by {difference:.3g} (largest {largest:.3g})"
        )


def _numerics_digest(dtype: torch.dtype, numerics: Numerics, device: torch.device) -> str:
    """Equal digests, with equal weights, mean equal bits; so all that decides them is in it."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_name()}"
    parts = (str(dtype), numerics.name, device.type, processor, torch.__version__, "tp=1")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
