"""The load-time check that the paged model computes what transformers computes.

A short text runs through the paged model in two chunks, and through transformers' own attention in
one piece. If the model does anything that the paged forward pass does not support (a mask of its
own, a window passed wrongly, state that flows between tokens outside of attention), the logits
differ and the model is refused. Sliding windows are longer than a short text, so for the probe they
are shortened on both sides.

The rounding error is measured, too: in bfloat16 and float16, transformers computes the text a
second time in float32 with the same weights. The paged model must come about as close to that as
transformers does in the model's own dtype. This costs one more forward pass of 48 tokens in
float32, and the memory of the largest module's weights in float32.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from servicekit.logs import get_logger
from verifier.batch.target_model import FloatArray, TargetModel
from verifier.checkpoint.refusals import CheckpointError
from verifier.parity.comparison import (
    WINDOW_TOKENS,
    check_difference,
    check_rounding,
    distance_of,
    paged_logits,
    probe_text,
)
from verifier.parity.quantised_values import computed_in
from verifier.transformers_model.checkpoint import Checkpoint, reference_logits
from verifier.transformers_model.fp8_weights import rounds_rows

# Largest difference of any logit between two computations, relative to the largest logit. Wide,
# since a mixture of experts may route a token differently.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
# Largest distance of the paged model's logits from the float32 ones, relative to the distance of
# transformers' logits in the same dtype. Correct models had 0.75 to 1.05, cut into 8 ranks up to
# 1.3; a softmax scale that is 10 % wrong gives 4 in bfloat16 and 35 in float16.
ROUNDING_TOLERANCE = 2.0


logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Logits [T, V] of the text by transformers' own attention.

    Attributes:
        exact: computed in float32, by weights that are widened; None: `logits` are, or this model's
            code fails with wider weights.
        multiplies_in_fp8: whether `logits` are of such products.
    """

    logits: FloatArray
    exact: FloatArray | None
    multiplies_in_fp8: bool = False


def make_reference(
    model: PreTrainedModel,
    token_ids: list[int],
    *,
    quantization: str = "none",
    multiplies_in_fp8: bool = False,
) -> Reference:
    """The whole model's reference, computed on the model's device.

    Args:
        quantization: of a model that is to be quantised after it.
        multiplies_in_fp8: how it is to be multiplied then.
    """

    def logits_in(dtype: torch.dtype, *, rounds_rows: bool) -> FloatArray:
        with computed_in(model, dtype, quantization=quantization, rounds_rows=rounds_rows):
            return _as_floats(reference_logits(model, token_ids))

    if multiplies_in_fp8:
        return Reference(
            logits=logits_in(model.dtype, rounds_rows=True),
            exact=logits_in(torch.float32, rounds_rows=False),
            multiplies_in_fp8=True,
        )
    if quantization == "none":
        logits = _as_floats(reference_logits(model, token_ids))
    else:
        logits = logits_in(model.dtype, rounds_rows=False)
    if model.dtype is torch.float32:
        return Reference(logits=logits, exact=None)
    try:
        exact = logits_in(torch.float32, rounds_rows=False)
    except Exception as error:
        # Any model's code runs here. Only the coarse tolerance applies then.
        logger.warning("parity_probe_without_float32", reason=str(error))
        return Reference(logits=logits, exact=None)
    return Reference(logits=logits, exact=exact)


def check_parity(
    checkpoint: Checkpoint,
    model: TargetModel,
    *,
    block_size: int,
    max_model_len: int,
    reference: Reference | None = None,
) -> None:
    """Compares the paged model with transformers' own attention; writes to the first blocks.

    Args:
        reference: if the model is cut into ranks, the whole model's, of the text or of a longer
            one that begins with it; so a wrong cut shows, too. Windows are not shortened then.

    Raises:
        CheckpointError: they differ by more than rounding, or the paged model fails.
    """
    text = probe_text(vocab_size=checkpoint.vocab_size, max_model_len=max_model_len)
    try:
        with contextlib.ExitStack() as stack:
            if reference is None:
                stack.enter_context(
                    shortened_windows(checkpoint.model, WINDOW_TOKENS, below=max_model_len)
                )
            rows = paged_logits(model, text, [len(text) // 2], block_size=block_size)
            if reference is None:
                in_fp8 = rounds_rows(checkpoint.model)
                reference = make_reference(checkpoint.model, text, multiplies_in_fp8=in_fp8)
    except Exception as error:
        # Any model's code runs here and may fail in any way.
        raise CheckpointError(f"{checkpoint.architecture} is not served: {error}") from error
    expected = reference.logits[: len(text)]
    # The least rounding may turn a row into other FP8 values, and from layer to layer more of them,
    # until both sides are as far from each other as from the exact logits.
    if not reference.multiplies_in_fp8:
        check_difference(rows, expected, TOLERANCES[checkpoint.dtype])
    if reference.exact is not None:
        exact = reference.exact[: len(text)]
        check_rounding(rows, exact, distance_of(expected, exact), ROUNDING_TOLERANCE)


def _as_floats(logits: torch.Tensor) -> FloatArray:
    floats: FloatArray = logits.float().cpu().numpy()
    return floats


@contextlib.contextmanager
def shortened_windows(
    model: PreTrainedModel, num_tokens: int, *, below: int = sys.maxsize
) -> Iterator[None]:
    """Within the context, every longer sliding window, and shorter than `below`, is shortened.

    transformers' masks read the window from the configuration, attention reads it there or from a
    copy in the module. Both are changed, so that a model that uses only one of them differs.
    """
    holders: dict[int, Any] = {id(model.config): model.config}
    for module in model.modules():
        holders[id(module)] = module
        if (config := getattr(module, "config", None)) is not None:
            holders[id(config)] = config
    changed: list[tuple[Any, int]] = []
    try:
        for holder in holders.values():
            window = vars(holder).get("sliding_window")
            if isinstance(window, int) and num_tokens < window < below:
                changed.append((holder, window))
                holder.sliding_window = num_tokens
        yield
    finally:
        for holder, window in changed:
            holder.sliding_window = window
