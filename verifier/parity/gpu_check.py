"""The check of the decoder for GPUs at every load, against transformers' logits of a short text.

transformers computes the text first, and its model has left the device when the decoder's weights
come: the device never holds both.
"""

import dataclasses
import functools
import gc
from pathlib import Path

import torch

from servicekit.logs import get_logger
from verifier.attention.backend import AttentionBackend
from verifier.batch.target_model import FloatArray
from verifier.checkpoint.refusals import CheckpointError
from verifier.gpu.current_device import current_device
from verifier.gpu.decoder import GpuDecoder, WrittenCache, kv_shape_of
from verifier.gpu.device_batch import BatchLimits
from verifier.gpu.fp8 import widening
from verifier.gpu.groups import GroupedWeight
from verifier.gpu.layers.states import states_of
from verifier.gpu.weights import GpuWeights
from verifier.parity.comparison import (
    WINDOW_TOKENS,
    check_difference,
    check_rounding,
    paged_logits,
    probe_text,
)
from verifier.parity.reference import fp8_reference, reference
from verifier.parity.transformers_check import ROUNDING_TOLERANCE, TOLERANCES

logger = get_logger(__name__)

# Rows of the largest product that a check of strict numerics compares: as many as any tile takes.
_MOST_ROWS = 256


def reference_on(
    folder: Path, dtype: torch.dtype, is_fp8: bool, device: torch.device
) -> tuple[FloatArray, float, float | None]:
    """What `check_decoder` takes, and nothing of transformers' model left on the device.

    Computed on the CPU if the model, which is not quantised there, does not fit on the device.

    Raises:
        CheckpointError: it could not compute them.
    """
    fits = True
    try:
        fp8_distance = None
        if is_fp8:
            exact, rounding, fp8_distance = fp8_reference(folder, dtype=dtype, device=device)
        else:
            exact, rounding = reference(folder, dtype=dtype, quantization="none", device=device)
    except CheckpointError:
        raise
    except torch.OutOfMemoryError as error:
        if device.type == "cpu":
            raise CheckpointError(f"transformers' logits could not be computed: {error}") from error
        # Outside of this block nothing refers to the model.
        fits = False
    except Exception as error:
        # Any model's code runs there.
        raise CheckpointError(f"transformers' logits could not be computed: {error}") from error
    if device.type == "cuda":
        # Modules may refer to each other in a circle.
        gc.collect()
        torch.cuda.empty_cache()
    if not fits:
        logger.info("reference_on_cpu", reason="transformers' model does not fit on the GPU")
        return reference_on(folder, dtype, is_fp8, torch.device("cpu"))
    logits: FloatArray = exact.cpu().numpy()
    return logits, rounding, fp8_distance


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
    float32 and with shortened windows: in two chunks and a single token. If the decoder is strict,
    the bits must not depend on these pieces either.

    Args:
        rounding: the distance that transformers has in the model's dtype.
        fp8_distance: the distance that it has with products in FP8; None: the decoder has none.
            Otherwise the decoder is compared as above by widened weights; then by its products.

    Raises:
        CheckpointError: they differ by more than rounding, the bits depend on the pieces though the
            decoder is strict, or it fails.
    """
    logits = _probed_logits(widening(weights), backend, block_size=block_size)
    is_rounded = weights.dtype is not torch.float32
    # Rounding may route a token to other experts, and recurrent states carry it on: either changes
    # logits by any amount. The distance that follows is a median over tokens.
    is_unsteady = weights.config.num_experts or weights.config.delta is not None
    if not (is_rounded and is_unsteady):
        check_difference(logits, exact, TOLERANCES[weights.dtype])
    if is_rounded:
        check_rounding(logits, exact, rounding, ROUNDING_TOLERANCE)
    if fp8_distance is not None:
        logits = _probed_logits(weights, backend, block_size=block_size)
        check_rounding(logits, exact, fp8_distance, ROUNDING_TOLERANCE)


def _probed_logits(
    weights: GpuWeights, backend: AttentionBackend, *, block_size: int
) -> FloatArray:
    """The decoder's logits [T, V] of the probe's text, with shortened windows; of a strict one, cut
    in three ways.

    Raises:
        CheckpointError: the decoder fails, or it is strict and the bits depend on the pieces.
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
    decoder = GpuDecoder(
        dataclasses.replace(weights, layers=layers),
        backend=backend,
        cache=cache,
        limits=BatchLimits(
            max_num_tokens=len(text),
            max_num_tables=1,
            max_table_blocks=-(-len(text) // block_size),
            num_state_slots=1,
        ),
        states=states_of(
            weights.config, num_slots=1, max_drafts=0, dtype=weights.dtype, device=weights.device
        ),
    )
    cuts = sorted({len(text) // 2, len(text) - 1} - {0})
    # Strict: whole and in small pieces, too, which may have other tiles.
    is_strict = weights.operations.is_strict
    other_cuts = [[], list(range(1, len(text), 5))] if is_strict else []
    try:
        logits, *others = [
            paged_logits(
                decoder,
                text,
                each,
                block_size=block_size,
                has_long_rope=weights.config.max_short_tokens is not None,
            )
            for each in (cuts, *other_cuts)
        ]
        tiles_agree = not is_strict or _tiles_agree(weights)
    except Exception as error:
        # Kernels are compiled and launched for the first time here.
        raise CheckpointError(f"the decoder for GPUs cannot compute it: {error}") from error
    if any(other.tobytes() != logits.tobytes() for other in others):
        raise CheckpointError("--numerics strict: the bits of logits depend on chunks on this GPU")
    if not tiles_agree:
        raise CheckpointError("--numerics strict: the bits of products depend on rows on this GPU")
    return logits


def _tiles_agree(weights: GpuWeights) -> bool:
    """Whether a product's rows have the same bits among any number of rows: the probe's text is
    shorter than some tiles.
    """
    generator = torch.Generator().manual_seed(0)
    half_rows, half_weight = (
        torch.randn(shape, generator=generator).to(weights.device, weights.dtype)
        for shape in ((2 * _MOST_ROWS, 512), (128, 512))
    )
    # The halves cancel each other. What is left of a sum is its rounding, which another order of
    # adding changes; beside whole sums, rounding to a short dtype would hide that.
    rows = torch.cat((half_rows, -half_rows), dim=1)
    weight = torch.cat((half_weight, half_weight), dim=1)
    linear, grouped_linear = weights.operations.linear, weights.operations.grouped_linear
    products = [functools.partial(linear, weight=weight)]
    for form in {each.form for each in weights.grouped}:
        grouped = GroupedWeight.empty(form, tuple(weight.shape), device=weights.device)
        codes, groups = grouped.codes, grouped.groups
        # Even ones, of which none is NaN.
        half_codes = 2 * torch.randint(128, codes.chunk(2, dim=1)[0].shape, generator=generator)
        codes.copy_(torch.cat((half_codes, half_codes), dim=1))
        # Exponents around 0; else below 1.
        half = torch.randint(120, 128, groups.chunk(2)[0].shape, generator=generator)
        half = half if form.scale is torch.uint8 else half / 128
        groups.copy_(torch.cat((half, half)) if form.group else half)
        products.append(functools.partial(grouped_linear, weight=grouped))
    with torch.inference_mode(), current_device(weights.device):
        counts = [1 << power for power in range(_MOST_ROWS.bit_length())]
        return all(
            torch.equal(multiply(rows[:count]), whole[:count])
            for multiply in products
            for whole in [multiply(rows)]
            for count in counts
        )
