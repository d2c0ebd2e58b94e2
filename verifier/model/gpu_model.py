"""Whether this project's decoder for GPUs serves a model, and loads it then."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from servicekit.config import ConfigError
from servicekit.logs import get_logger
from verifier.attention.backend import AttendsToTables, AttentionBackend
from verifier.attention.kv_cache import block_bytes
from verifier.checkpoint.description import DecoderDescription, describe_decoder
from verifier.checkpoint.digests import begin_digest
from verifier.checkpoint.model_config import ModelConfig
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.config import VerifierConfig
from verifier.gpu.attention.selection import (
    AttentionChoice,
    choose_attention,
    lack_of_triton,
    make_backend,
)
from verifier.gpu.decoder import GpuDecoder, Graphs, WrittenCache, kv_shape_of
from verifier.gpu.device_batch import BatchLimits
from verifier.gpu.graph_pool import CudaCapture, GraphLimits
from verifier.gpu.layers.states import DeviceStates, slot_bytes, states_of
from verifier.gpu.loading.device_tensors import TORCH_DTYPES
from verifier.gpu.loading.loader import load_weights
from verifier.gpu.numerics_digest import numerics_digest
from verifier.gpu.operations import operations_for
from verifier.model.gpu_memory import check_largest_steps
from verifier.model.kv_room import room_for_kv_blocks
from verifier.model.memory import (
    MEASURED_FRACTION,
    UNMEASURED_FRACTION,
    choose_num_state_slots,
    free_memory_bytes,
)
from verifier.model.ready_model import ReadyModel, choose_max_model_len, dtype_name
from verifier.parity.gpu_check import check_decoder, reference_on

if TYPE_CHECKING:
    from verifier.gpu.device_step import StepSampler

_GRAPH_BYTES = 1 << 30
"""For the graphs of a model, beside its largest step; at most a quarter of what weights leave."""

_MAX_CAPTURE_S = 60.0

STRICT_ATTENTION = "triton"
"""The only backend whose rows do not depend on the batch."""

logger = get_logger(__name__)


def find_on_gpu(config: VerifierConfig, device: torch.device) -> DecoderDescription | None:
    """The model as the decoder for GPUs computes it; None: transformers has to compute it.

    Raises:
        CheckpointError: the folder holds no sound checkpoint.
        ConfigError: the flags ask for an attention backend that cannot run, or for strict numerics
            of what this decoder does not serve.
    """
    reason = None
    if config.tensor_parallel_size > 1:
        reason = "--tensor-parallel-size"
    elif device.type == "cuda" and (lack := lack_of_triton()):
        reason = lack
    else:
        try:
            described = describe_decoder(config.model)
            _, backend = _attention(config, described, device)
            reason = _lacks(config, described, backend)
            if reason is None:
                return described
        except NotServedError as error:
            reason = str(error)
    if config.numerics == "strict":
        raise ConfigError(
            "--numerics",
            f"strict: on a GPU is the decoder for GPUs', which does not serve this: {reason}",
        )
    logger.info("served_by_transformers", reason=reason)
    return None


def load_on_gpu(
    config: VerifierConfig, described: DecoderDescription, device: torch.device
) -> ReadyModel:
    """Loads and checks a model that `find_on_gpu` has found; on a CPU, too, in plain torch,
    which is not strict.

    transformers computes its logits first; see `parity/gpu_check.py`.

    Raises:
        CheckpointError: the check against transformers failed, or could not be made.
        ConfigError: the flags ask for more than the machine has.
    """
    shape = described.config
    is_strict = config.numerics == "strict"
    operations = operations_for(device, is_strict=is_strict)
    dtype = TORCH_DTYPES[described.other_type(config.dtype)]
    attention, backend = _attention(config, described, device)
    digest = begin_digest(config.model)
    is_fp8 = config.quantization == "fp8"
    exact, rounding, fp8_distance = reference_on(config.model, dtype, is_fp8, device)
    with _memory_for("--model", "its weights do not fit on the GPU"):
        weights = load_weights(
            described,
            dtype=config.dtype,
            device=device,
            operations=operations,
            quantization=config.quantization,
        )
    check_decoder(
        weights,
        backend,
        block_size=attention.block_size,
        exact=exact,
        rounding=rounding,
        fp8_distance=fp8_distance,
    )
    kv_shape = kv_shape_of(shape, dtype)
    longest = min(
        config.max_model_len or shape.max_position_embeddings, shape.max_position_embeddings
    )
    with _memory_for("--max-num-seqs", "its sampler does not fit"):
        # Before the memory is measured, so that it counts.
        sampler = sampler_for(config, vocab_size=shape.vocab_size, device=device)
    graphs = _graphs_for(backend, device)
    # Before the memory is measured, too.
    states = _states_for(config, shape, dtype, device)
    num_state_slots = 0 if states is None else states.lengths.num_slots

    def assembled(num_blocks: int, longest: int) -> GpuDecoder:
        cache = WrittenCache(
            kv_shape, num_blocks=num_blocks, block_size=attention.block_size, device=device
        )
        limits = BatchLimits(
            max_num_tokens=config.max_num_batched_tokens,
            max_num_tables=config.max_num_seqs,
            max_table_blocks=-(-longest // attention.block_size),
            num_state_slots=num_state_slots,
        )
        return GpuDecoder(
            weights,
            backend=backend,
            cache=cache,
            limits=limits,
            states=states,
            sampler=sampler,
            graphs=graphs,
        )

    num_kv_blocks = room_for_kv_blocks(
        config,
        device,
        lambda num_blocks: assembled(num_blocks, longest),
        model_limit=shape.max_position_embeddings,
        block_size=attention.block_size,
        block_bytes=block_bytes(kv_shape, attention.block_size),
        vocab_size=shape.vocab_size,
        graph_bytes=0 if graphs is None else graphs.limits.max_bytes,
        num_state_slots=num_state_slots,
    )
    max_model_len = choose_max_model_len(
        config,
        model_limit=shape.max_position_embeddings,
        room=num_kv_blocks * attention.block_size,
    )
    logger.info("gpu_decoder", device=str(device))
    with _memory_for("--num-kv-blocks", f"{num_kv_blocks} blocks do not fit on the GPU"):
        model = assembled(num_kv_blocks, max_model_len)
    with _memory_for("--num-kv-blocks", f"{num_kv_blocks} blocks leave no memory for a step"):
        _warm_up(model)
    if config.num_kv_blocks is not None:
        check_largest_steps(
            config,
            model,
            longest=max_model_len,
            block_size=attention.block_size,
            vocab_size=shape.vocab_size,
            num_state_slots=num_state_slots,
        )
    return ReadyModel(
        model=model,
        numerics="strict" if is_strict else "fast",
        num_threads=torch.get_num_threads(),
        model_digest=digest.result(),
        # Else bits depend on the batch.
        numerics_digest=numerics_digest(
            weights, block_size=attention.block_size, max_model_len=max_model_len
        )
        if is_strict
        else "",
        architecture=shape.architecture,
        dtype=dtype_name(
            str(dtype).removeprefix("torch."),
            described.quantization if weights.keeps_codes else config.quantization,
            multiplies_in_fp8=is_fp8,
        ),
        device=device.type,
        attention_backend=attention.name,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        block_size=attention.block_size,
        num_kv_blocks=num_kv_blocks,
        eos_token_ids=shape.eos_token_ids,
        hidden_size=shape.hidden_size,
        max_short_tokens=shape.max_short_tokens,
        num_state_slots=num_state_slots,
    )


@contextlib.contextmanager
def _memory_for(flag: str, lack: str) -> Iterator[None]:
    """Raises a ConfigError that names the flag where the GPU's memory is short."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(flag, f"{lack}: {error}") from error


def _warm_up(model: GpuDecoder) -> None:
    """Compiles the sampler's kernels, and captures graphs."""
    try:
        model.warm_up()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CheckpointError(f"the decoder for GPUs cannot run a step: {error}") from error


def _lacks(
    config: VerifierConfig, described: DecoderDescription, backend: AttentionBackend
) -> str | None:
    """Why this decoder does not serve the model by these flags; None: it does."""
    if config.quantization != "none" and config.numerics == "strict":
        return f"--quantization {config.quantization}"
    if config.quantization != "none" and described.config.num_experts:
        return f"--quantization {config.quantization} of a mixture of experts"
    if described.config.attention_softcap and not getattr(backend, "caps_scores", False):
        return f"attention backend {backend.name} serves no softcap"
    if described.config.family.has_sinks and not getattr(backend, "adds_sinks", False):
        return f"attention backend {backend.name} serves no sinks"
    if config.numerics == "strict" and backend.name != STRICT_ATTENTION:
        return f"attention backend {backend.name}, whose bits depend on the batch"
    return None


def sampler_for(
    config: VerifierConfig, *, vocab_size: int, device: torch.device
) -> "StepSampler | None":
    """The sampler of every step within the flags' limits; None: on a CPU, the host samples."""
    if device.type != "cuda":
        return None
    # Imports Triton, which a CPU needs not have.
    from verifier.gpu.device_step import StepSampler
    from verifier.gpu.sampling.sampler import DeviceSampler

    most_rows = config.max_num_seqs * (config.max_num_speculative_tokens + 1)
    return StepSampler(
        DeviceSampler(
            device=device,
            vocab_size=vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_num_drafts=config.max_num_speculative_tokens,
            max_num_rows=min(config.max_num_batched_tokens, most_rows),
        )
    )


def _states_for(
    config: VerifierConfig, shape: ModelConfig, dtype: torch.dtype, device: torch.device
) -> DeviceStates | None:
    """The slots of recurrent states; None: the model has none."""
    max_drafts = min(config.max_num_speculative_tokens, config.max_num_batched_tokens)
    own_bytes = slot_bytes(shape, max_drafts, dtype)
    if not own_bytes:
        return None
    is_measured = device.type == "cuda"
    num_slots = choose_num_state_slots(
        config,
        slot_bytes=own_bytes,
        free_bytes=torch.cuda.mem_get_info(device)[0] if is_measured else free_memory_bytes(),
        default_fraction=MEASURED_FRACTION if is_measured else UNMEASURED_FRACTION,
    )
    with _memory_for("--max-num-seqs", f"{num_slots} slots of recurrent states do not fit"):
        return states_of(
            shape, num_slots=num_slots, max_drafts=max_drafts, dtype=dtype, device=device
        )


def _graphs_for(backend: AttentionBackend, device: torch.device) -> Graphs | None:
    """None: every kernel is launched."""
    if device.type != "cuda" or not isinstance(backend, AttendsToTables):
        return None
    max_bytes = min(_GRAPH_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    limits = GraphLimits(max_bytes=max_bytes, max_prepare_s=_MAX_CAPTURE_S)
    return Graphs(capture=CudaCapture(device), limits=limits)


def _attention(
    config: VerifierConfig, described: DecoderDescription, device: torch.device
) -> tuple[AttentionChoice, AttentionBackend]:
    choice = choose_attention(
        config.attention_backend,
        device=device,
        dtype=TORCH_DTYPES[described.other_type(config.dtype)],
        head_dim=max(layer.head_dim for layer in described.config.layers),
    )
    return choice, make_backend(choice, device=device, is_strict=config.numerics == "strict")
