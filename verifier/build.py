"""Puts a verifier together: checkpoint, K/V cache, scheduler, engine. The only place that knows
all the parts.
"""

import dataclasses
import hashlib
import platform
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from servicekit.config import ConfigError
from servicekit.logs import get_logger
from verifier.attention.sdpa import SdpaBackend
from verifier.batch_layout import ScheduledTokens, lay_out
from verifier.block_pool import BlockPool
from verifier.checkpoint import Checkpoint, CheckpointError, load_checkpoint, reference_logits
from verifier.config import VerifierConfig
from verifier.engine import Engine, EngineObserver, EngineOptions, Observers
from verifier.kv_cache import KVCache
from verifier.numerics import BY_NAME, STRICT, Numerics
from verifier.philox import exponential_noise
from verifier.rejection_sampler import AcceptanceRule
from verifier.scheduler import Scheduler
from verifier.scored_rows import max_rows_per_step
from verifier.target_model import TargetModel
from verifier.tensor_parallel.collectives import Collectives
from verifier.tensor_parallel.launch import choose_gpu
from verifier.tensor_parallel.leader import Leader
from verifier.tensor_parallel.sharding import num_local_kv_heads, shard
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPart:
    """A rank's part of the model; the whole model where there is one rank.

    Attributes:
        reference: rank 0 of several: the whole model's logits [T, V] of the parity probe's text.
    """

    checkpoint: Checkpoint
    reference: torch.Tensor | None = None


def load_model(config: VerifierConfig, leader: Leader | None = None) -> LoadedModel:
    """Loads and checks the configured checkpoint. Takes as long as the weights take to read.

    Args:
        leader: where this process is rank 0 of several.

    Raises:
        CheckpointError: it cannot be served.
        ConfigError: the flags ask for more than there is.
        RankLostError: another rank is gone.
    """
    device = choose_device(config, rank=0)
    numerics = choose_numerics(config, device)
    if leader is None:
        part = load_part(config, device=device, collectives=None)
        num_kv_blocks = room_for_kv_blocks(config, part.checkpoint, device)
    else:
        collectives = leader.connect(device=device, is_ordered=numerics is STRICT)
        part = load_part(config, device=device, collectives=collectives)
        elsewhere = leader.load_others(identity_of(config, part.checkpoint, device))
        num_kv_blocks = min(elsewhere, room_for_kv_blocks(config, part.checkpoint, device))
    checkpoint = part.checkpoint
    max_model_len = _max_model_len(config, checkpoint, num_kv_blocks)
    if leader is not None:
        leader.begin(num_kv_blocks=num_kv_blocks, max_model_len=max_model_len)
    own_model, cache, backend = assemble(
        config,
        checkpoint,
        device=device,
        num_kv_blocks=num_kv_blocks,
        max_model_len=max_model_len,
    )
    model = own_model if leader is None else leader.model(own_model)
    _check_parity(part, model, cache, numerics, max_model_len)
    served = ServedModel(
        model_id=config.model_id or config.model.resolve().name,
        model_digest=checkpoint.model_digest,
        numerics_digest=_numerics_digest(
            checkpoint.dtype, numerics, device, config.tensor_parallel_size
        ),
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


def load_part(
    config: VerifierConfig, *, device: torch.device, collectives: Collectives | None
) -> LoadedPart:
    """Loads the checkpoint and, of several ranks, keeps this one's part.

    The model is cut as soon as it is read, on the CPU: whatever replaces its layers by faster
    ones comes later and sees the parts.
    """
    if device.type == "cpu" or collectives is not None:
        torch.set_num_threads(config.num_threads())
    if collectives is None:
        return LoadedPart(
            checkpoint=load_checkpoint(config.model, dtype=config.dtype, device=device)
        )
    references = []

    def cut(model: PreTrainedModel) -> None:
        if collectives.rank == 0:
            num_tokens = min(_PARITY_TOKENS, int(model.config.max_position_embeddings))
            token_ids = _parity_token_ids(num_tokens, int(model.config.vocab_size))
            references.append(reference_logits(model, token_ids))
        shard(model, collectives)

    checkpoint = load_checkpoint(config.model, dtype=config.dtype, device=device, prepare=cut)
    num_kv_heads = num_local_kv_heads(
        checkpoint.model, checkpoint.kv_shape.num_kv_heads, collectives.size
    )
    kv_shape = dataclasses.replace(checkpoint.kv_shape, num_kv_heads=num_kv_heads)
    return LoadedPart(
        checkpoint=dataclasses.replace(checkpoint, kv_shape=kv_shape),
        reference=references[0] if references else None,
    )


def assemble(
    config: VerifierConfig,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    num_kv_blocks: int,
    max_model_len: int,
) -> tuple[TransformersModel, KVCache, SdpaBackend]:
    """The model over its K/V cache."""
    cache = KVCache(
        checkpoint.kv_shape,
        num_blocks=num_kv_blocks,
        block_size=config.block_size,
        device=device,
    )
    backend = SdpaBackend(
        numerics=choose_numerics(config, device),
        dtype=checkpoint.dtype,
        device=device,
        max_model_len=max_model_len,
    )
    model = TransformersModel(checkpoint.model, backend=backend, cache=cache, device=device)
    return model, cache, backend


def identity_of(
    config: VerifierConfig, checkpoint: Checkpoint, device: torch.device
) -> dict[str, str]:
    """What all ranks must have alike, by the flag that decides it."""
    return {
        "--model": checkpoint.model_digest,
        "--device": device.type,
        "--dtype": str(checkpoint.dtype).removeprefix("torch."),
        "--numerics": choose_numerics(config, device).name,
        "--block-size": str(config.block_size),
    }


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


def choose_device(config: VerifierConfig, *, rank: int) -> torch.device:
    """Where a rank runs.

    Raises:
        ConfigError: there is no such device, or not one for every rank.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        if config.devices is not None:
            raise ConfigError("--devices", "names GPUs, but the model runs on CPU")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device", "cuda: no GPU is available to this torch build")
    if config.devices is None and config.tensor_parallel_size == 1:
        return torch.device("cuda")
    gpu = choose_gpu(
        config.devices,
        rank=rank,
        tensor_parallel_size=config.tensor_parallel_size,
        num_gpus=torch.cuda.device_count(),
    )
    # What allocates or launches without naming a device means this one.
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def choose_numerics(config: VerifierConfig, device: torch.device) -> Numerics:
    """The configured mode, or what `auto` stands for."""
    name = config.numerics
    if name == "auto":
        name = "strict" if device.type == "cpu" else "fast"
    if name == "strict" and device.type != "cpu":
        raise ConfigError("--numerics", "strict: only known to hold on CPU so far")
    return BY_NAME[name]


def room_for_kv_blocks(config: VerifierConfig, checkpoint: Checkpoint, device: torch.device) -> int:
    """K/V blocks: the flag's, or as many as can be of use and the memory has room for."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    longest = config.max_model_len or checkpoint.max_position_embeddings
    wanted = config.max_num_seqs * -(-longest // config.block_size)
    free_bytes = _free_bytes(device) * config.kv_memory_fraction
    if device.type == "cpu":
        free_bytes /= config.tensor_parallel_size  # all ranks take from the same memory
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


def _parity_token_ids(num_tokens: int, vocab_size: int) -> list[int]:
    return [(37 * i + 11) % vocab_size for i in range(num_tokens)]


def _check_parity(
    part: LoadedPart,
    model: TargetModel,
    cache: KVCache,
    numerics: Numerics,
    max_model_len: int,
) -> None:
    """Compares the paged model with transformers' own attention on a short text, in two chunks.

    Of several ranks, the reference is the whole model's: a wrong cut shows too.

    Raises:
        CheckpointError: they differ by more than rounding, or ours cannot compute it at all.
    """
    checkpoint = part.checkpoint
    num_tokens = min(_PARITY_TOKENS, max_model_len)
    token_ids = _parity_token_ids(num_tokens, checkpoint.vocab_size)
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
        if part.reference is None:
            expected = reference_logits(checkpoint.model, token_ids)
        else:
            expected = part.reference[:num_tokens].to(rows.device)
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


def _numerics_digest(
    dtype: torch.dtype, numerics: Numerics, device: torch.device, tensor_parallel_size: int
) -> str:
    """Equal digests, with equal weights, mean equal bits; so all that decides them is in it."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_name()}"
    parallel = f"tp={tensor_parallel_size}"
    parts = (str(dtype), numerics.name, device.type, processor, torch.__version__, parallel)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
