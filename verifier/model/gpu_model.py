"""Whether this project's decoder for GPUs serves a model, and loads it then."""

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path

import torch

from servicekit.config import ConfigError
from servicekit.logs import get_logger
from verifier.attention.backend import AttentionBackend
from verifier.attention.selection import (
    AttentionChoice,
    choose_attention,
    lack_of_triton,
    make_backend,
)
from verifier.batch.target_model import FloatArray
from verifier.config import VerifierConfig
from verifier.cpu.loading.loader import DecoderDescription, describe_decoder
from verifier.cpu.loading.refusals import CheckpointError, NotServedError
from verifier.cpu.parity import (
    WINDOW_TOKENS,
    check_difference,
    check_rounding,
    paged_logits,
    probe_text,
)
from verifier.gpu.decoder import GpuDecoder, WrittenCache, kv_shape_of
from verifier.gpu.fp8 import widening
from verifier.gpu.loading import TORCH_DTYPES, load_weights
from verifier.gpu.weights import GpuWeights
from verifier.model.digests import begin_digest
from verifier.model.gpu_memory import PROFILE_BLOCKS, free_for_kv_bytes
from verifier.model.memory import (
    CPU_FRACTION,
    GPU_FRACTION,
    choose_num_kv_blocks,
    free_memory_bytes,
)
from verifier.model.parity_probe import ROUNDING_TOLERANCE, TOLERANCES
from verifier.model.parity_reference import fp8_reference, reference
from verifier.model.ready_model import ReadyModel, choose_max_model_len, dtype_name

logger = get_logger(__name__)


def find_on_gpu(config: VerifierConfig, device: torch.device) -> DecoderDescription | None:
    """The model as the decoder for GPUs computes it; None: transformers shall compute it.

    Raises:
        CheckpointError: the folder holds no sound checkpoint.
        ConfigError: the flags ask for an attention backend that cannot run.
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
            if described.config.attention_softcap and not serves_softcap(backend):
                reason = f"attention backend {backend.name} serves no softcap"
            elif described.config.num_experts and config.quantization != "none":
                reason = f"--quantization {config.quantization} of a mixture of experts"
            else:
                return described
        except NotServedError as error:
            reason = str(error)
    logger.info("served_by_transformers", reason=reason)
    return None


def load_on_gpu(
    config: VerifierConfig, described: DecoderDescription, device: torch.device
) -> ReadyModel:
    """Loads and checks a model that `find_on_gpu` has found; on a CPU, too, in plain torch.

    transformers' model is on the device first, for its logits, and has left it when the weights
    are loaded: the device never holds both.

    Raises:
        CheckpointError: the check against transformers failed, or could not be made.
        ConfigError: the flags ask for more than the machine has.
    """
    shape = described.config
    dtype = TORCH_DTYPES[described.other_type(config.dtype)]
    attention, backend = _attention(config, described, device)
    digest = begin_digest(config.model)
    is_fp8 = config.quantization == "fp8"
    exact, rounding, fp8_distance = _reference(config.model, dtype, is_fp8, device)
    try:
        weights = load_weights(
            described, dtype=config.dtype, device=device, quantization=config.quantization
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError("--model", f"its weights do not fit on the GPU: {error}") from error
    check_decoder(
        weights,
        backend,
        block_size=attention.block_size,
        exact=exact,
        rounding=rounding,
        fp8_distance=fp8_distance,
    )
    kv_shape = kv_shape_of(shape, dtype)

    def assembled(num_blocks: int) -> GpuDecoder:
        cache = WrittenCache(
            kv_shape, num_blocks=num_blocks, block_size=attention.block_size, device=device
        )
        return GpuDecoder(weights, backend=backend, cache=cache)

    num_kv_blocks = _room_for_kv_blocks(
        config,
        device,
        assembled,
        model_limit=shape.max_position_embeddings,
        block_size=attention.block_size,
        block_bytes=kv_shape.block_bytes(attention.block_size),
    )
    max_model_len = choose_max_model_len(
        config,
        model_limit=shape.max_position_embeddings,
        room=num_kv_blocks * attention.block_size,
    )
    logger.info("gpu_decoder", device=str(device))
    try:
        model = assembled(num_kv_blocks)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "--num-kv-blocks", f"{num_kv_blocks} blocks do not fit on the GPU: {error}"
        ) from error
    return ReadyModel(
        model=model,
        numerics="fast",
        num_threads=torch.get_num_threads(),
        model_digest=digest.result(),
        # Bits depend on the batch.
        numerics_digest="",
        architecture=shape.architecture,
        dtype=dtype_name(
            str(dtype).removeprefix("torch."),
            config.quantization,
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
    )


def check_decoder(
    weights: GpuWeights,
    backend: AttentionBackend,
    *,
    block_size: int,
    exact: FloatArray,
    rounding: float,
    fp8_distance: float | None = None,
) -> None:
    """Compares the decoder with transformers' logits [T, V] of the probe's text, computed in
    float32 and with shortened windows: in two chunks and a single token.

    Args:
        rounding: the distance that transformers has in the model's dtype.
        fp8_distance: the distance that it has with products in FP8; None: the decoder has none.
            Otherwise the decoder is compared as above by widened weights; then by its products.

    Raises:
        CheckpointError: they differ by more than rounding, or the decoder fails.
    """
    logits = _probed_logits(widening(weights), backend, block_size=block_size)
    is_rounded = weights.dtype is not torch.float32
    # Rounding may route a token to other experts, which changes its logits by any amount. The
    # distance that follows is a median over tokens.
    if not (is_rounded and weights.config.num_experts):
        check_difference(logits, exact, TOLERANCES[weights.dtype])
    if is_rounded:
        check_rounding(logits, exact, rounding, ROUNDING_TOLERANCE)
    if fp8_distance is not None:
        logits = _probed_logits(weights, backend, block_size=block_size)
        check_rounding(logits, exact, fp8_distance, ROUNDING_TOLERANCE)


def _probed_logits(
    weights: GpuWeights, backend: AttentionBackend, *, block_size: int
) -> FloatArray:
    """The decoder's logits [T, V] of the probe's text, with shortened windows.

    Raises:
        CheckpointError: the decoder fails.
    """
    text = probe_text(
        vocab_size=weights.config.vocab_size,
        max_model_len=weights.config.max_position_embeddings,
    )
    layers = [
        dataclasses.replace(layer, sliding_window=min(layer.sliding_window, WINDOW_TOKENS))
        if layer.sliding_window
        else layer
        for layer in weights.layers
    ]
    cache = WrittenCache(
        kv_shape_of(weights.config, weights.dtype),
        num_blocks=-(-len(text) // block_size),
        block_size=block_size,
        device=weights.device,
    )
    decoder = GpuDecoder(dataclasses.replace(weights, layers=layers), backend=backend, cache=cache)
    cuts = sorted({len(text) // 2, len(text) - 1} - {0})
    try:
        return paged_logits(decoder, text, cuts, block_size=block_size)
    except Exception as error:
        # Kernels are compiled and launched for the first time here.
        raise CheckpointError(f"the decoder for GPUs cannot compute it: {error}") from error


def serves_softcap(backend: AttentionBackend) -> bool:
    """Whether `StepAttention.attend` of a backend takes `softcap`: scores s become
    softcap * tanh(s / softcap) before they are masked.
    """
    return bool(getattr(backend, "caps_scores", False))


def _reference(
    folder: Path, dtype: torch.dtype, is_fp8: bool, device: torch.device
) -> tuple[FloatArray, float, float | None]:
    """What `check_decoder` takes, and nothing of transformers' model left on the device.

    Raises:
        CheckpointError: it could not compute them.
    """
    try:
        fp8_distance = None
        if is_fp8:
            exact, rounding, fp8_distance = fp8_reference(folder, dtype=dtype, device=device)
        else:
            exact, rounding = reference(folder, dtype=dtype, quantization="none", device=device)
    except CheckpointError:
        raise
    except Exception as error:
        # Any model's code runs there.
        raise CheckpointError(f"transformers' logits could not be computed: {error}") from error
    if device.type == "cuda":
        # Modules may refer to each other in a circle.
        gc.collect()
        torch.cuda.empty_cache()
    logits: FloatArray = exact.cpu().numpy()
    return logits, rounding, fp8_distance


def _attention(
    config: VerifierConfig, described: DecoderDescription, device: torch.device
) -> tuple[AttentionChoice, AttentionBackend]:
    choice = choose_attention(
        config.attention_backend,
        block_size=config.block_size,
        device=device,
        dtype=TORCH_DTYPES[described.other_type(config.dtype)],
        head_dim=described.config.head_dim,
    )
    return choice, make_backend(choice, device=device)


def _room_for_kv_blocks(
    config: VerifierConfig,
    device: torch.device,
    assembled: Callable[[int], GpuDecoder],
    *,
    model_limit: int,
    block_size: int,
    block_bytes: int,
) -> int:
    """K/V blocks: the flag's, or as many as can be used and as memory has room for."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if device.type == "cuda":
        fraction = GPU_FRACTION
        free_bytes = free_for_kv_bytes(
            config,
            device,
            lambda: assembled(PROFILE_BLOCKS),
            model_limit=model_limit,
            block_size=block_size,
            block_bytes=block_bytes,
        )
    else:
        fraction, free_bytes = CPU_FRACTION, free_memory_bytes()
    return choose_num_kv_blocks(
        config,
        model_limit=model_limit,
        block_size=block_size,
        block_bytes=block_bytes,
        free_bytes=free_bytes,
        default_fraction=fraction,
    )
