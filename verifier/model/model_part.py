"""Loads one process's part of the model: all of it if there is one process only.

Resolves the flags for device and attention, and the room for K/V blocks.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch.torch_version import TorchVersion
from transformers import PreTrainedModel

from servicekit.config import ConfigError
from verifier.attention.kv_cache import KVCache, block_bytes
from verifier.checkpoint.digests import identity_on_this_machine
from verifier.config import VerifierConfig
from verifier.gpu.attention.selection import AttentionChoice, choose_attention, make_backend
from verifier.model.kv_room import room_for_kv_blocks
from verifier.model.support import MIN_COMPUTE_CAPABILITY, MIN_FP8_COMPUTE_CAPABILITY
from verifier.parity.comparison import probe_text
from verifier.parity.transformers_check import Reference, make_reference
from verifier.tensor_parallel.collectives import Collectives
from verifier.tensor_parallel.sharding import num_local_kv_heads, shard
from verifier.transformers_model.checkpoint import Checkpoint, load_checkpoint
from verifier.transformers_model.fp8_weights import multiplies_in_fp8, quantise_linear_layers
from verifier.transformers_model.paged_model import TransformersModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A rank's loaded part, and what the flags resolve to.

    Attributes:
        checkpoint: its digest is rank 0's only.
        files: the checkpoint's, as `identity_on_this_machine`.
        collectives: if there are several ranks.
        reference: at rank 0 of several: the whole model's, for the parity probe.
    """

    checkpoint: Checkpoint
    files: str
    device: torch.device
    attention: AttentionChoice
    quantization: str = "none"
    collectives: Collectives | None = None
    reference: Reference | None = None

    @property
    def block_size(self) -> int:
        return self.attention.block_size

    def identity(self) -> dict[str, str]:
        """What all ranks must have in common, by the flag that decides it."""
        return {
            "--model": self.files,
            "--device": self.device.type,
            "--dtype": str(self.checkpoint.dtype).removeprefix("torch."),
            "--quantization": self.quantization,
            "--attention-backend": self.attention.name,
            "block size": str(self.block_size),
        }


def load_part(
    config: VerifierConfig, *, device: torch.device, collectives: Collectives | None
) -> ModelPart:
    """Loads the checkpoint and, if there are several ranks, keeps this one's part.

    Several ranks cut the mapped model module by module, each straight to its device.

    Raises:
        CheckpointError: it cannot be served.
        ConfigError: the flags ask for what this model or device cannot do.
    """
    if device.type == "cpu" or collectives is not None:
        torch.set_num_threads(config.num_threads())
    reference = None
    if collectives is None:
        checkpoint = load_checkpoint(
            config.model, dtype=config.dtype, device=device, quantization=config.quantization
        )
    else:
        checkpoint, reference = _load_cut(config, device, collectives)
    return ModelPart(
        checkpoint=checkpoint,
        files=identity_on_this_machine(config.model),
        device=device,
        attention=choose_attention(
            config.attention_backend,
            device=device,
            dtype=checkpoint.dtype,
            head_dim=checkpoint.kv_shape.head_dim,
        ),
        quantization=config.quantization,
        collectives=collectives,
        reference=reference,
    )


def assemble(part: ModelPart, *, num_kv_blocks: int) -> TransformersModel:
    """Builds the model over its K/V cache."""
    cache = KVCache(
        part.checkpoint.kv_shape,
        num_blocks=num_kv_blocks,
        block_size=part.block_size,
        device=part.device,
    )
    return TransformersModel(
        part.checkpoint.model,
        backend=make_backend(part.attention, device=part.device),
        cache=cache,
        device=part.device,
        collectives=part.collectives,
    )


def choose_device(config: VerifierConfig, *, rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        ConfigError: there is no such device, there is none for some rank, or it is too old.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device", "cuda: no GPU is available to this torch build")
    size, num_gpus = config.tensor_parallel_size, torch.cuda.device_count()
    if size == 1:
        gpu = torch.cuda.current_device()
    else:
        if size > num_gpus:
            raise ConfigError("--tensor-parallel-size", f"{size}: there are {num_gpus} GPUs")
        gpu = rank
        # For code in this thread, which loads the model, that allocates or launches without naming
        # a device. The engine thread has a current device of its own, set for each forward pass.
        torch.cuda.set_device(gpu)
    _check_capability(gpu, config.quantization)
    return torch.device("cuda", gpu)


def _check_capability(gpu: int, quantization: str) -> None:
    """Refuses a GPU without support for bfloat16 and the attention kernels, or for FP8."""
    capability = torch.cuda.get_device_capability(gpu)
    have = ".".join(map(str, capability))
    if capability < MIN_COMPUTE_CAPABILITY:
        raise ConfigError(
            "--device", f"GPU {gpu} has compute capability {have}; 8.0 is needed (Ampere)"
        )
    if quantization == "fp8" and capability < MIN_FP8_COMPUTE_CAPABILITY:
        raise ConfigError(
            "--quantization", f"fp8: GPU {gpu} has compute capability {have}; 8.9 is needed (Ada)"
        )
    # Before 2.12, torch launches Ada's products of FP8 on the default stream, not the current one:
    # a captured graph lacks them.
    if quantization == "fp8" and capability == (8, 9) and TorchVersion(torch.__version__) < "2.12":
        raise ConfigError(
            "--quantization",
            f"fp8: on compute capability {have} torch 2.12 is needed; this is {torch.__version__}",
        )


def room_for_part(config: VerifierConfig, part: ModelPart) -> int:
    """K/V blocks of a rank, or of the only process; see `room_for_kv_blocks`."""
    return room_for_kv_blocks(
        config,
        part.device,
        lambda num_blocks: assemble(part, num_kv_blocks=num_blocks),
        model_limit=part.checkpoint.max_position_embeddings,
        block_size=part.block_size,
        block_bytes=block_bytes(part.checkpoint.kv_shape, part.block_size),
        vocab_size=part.checkpoint.vocab_size,
    )


def _load_cut(
    config: VerifierConfig, device: torch.device, collectives: Collectives
) -> tuple[Checkpoint, Reference | None]:
    """This rank's part of the checkpoint and, at rank 0, the whole model's reference."""
    reference = None
    in_fp8 = multiplies_in_fp8(device, config.quantization)

    def cut(model: PreTrainedModel) -> None:
        nonlocal reference
        if collectives.rank == 0:
            token_ids = probe_text(
                vocab_size=int(model.config.vocab_size),
                max_model_len=int(model.config.max_position_embeddings),
            )
            reference = make_reference(
                model,
                token_ids,
                quantization=config.quantization,
                multiplies_in_fp8=in_fp8,
            )

        def quantise(name: str) -> None:
            quantise_linear_layers(model, device, rounds_rows=in_fp8, within=name)

        # Each layer once it is cut: the device never holds the whole part unquantised.
        is_fp8 = config.quantization == "fp8"
        shard(model, collectives, device, convert=quantise if is_fp8 else None)

    checkpoint = load_checkpoint(
        config.model,
        dtype=config.dtype,
        device=device,
        quantization=config.quantization,
        prepare=cut,
        is_digested=collectives.rank == 0,
    )
    num_kv_heads = num_local_kv_heads(
        checkpoint.model, checkpoint.kv_shape.num_kv_heads, collectives.size
    )
    kv_shape = dataclasses.replace(checkpoint.kv_shape, num_kv_heads=num_kv_heads)
    return dataclasses.replace(checkpoint, kv_shape=kv_shape), reference
