"""The text of the check, its logits by a paged model, and how far they may be from others."""

import itertools

import numpy as np

from verifier.batch.batch_layout import ScheduledTokens, lay_out
from verifier.batch.target_model import TargetModel
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.weight_types import FloatArray

NUM_TOKENS = 48
WINDOW_TOKENS = 16
"""Sliding windows are longer than a short text, so both sides shorten them for the check."""

# What rounding costs transformers counts as at least this share of the largest logit.
_SMALLEST_ROUNDING = 1e-5
_REFUSAL = "the model is not computed as transformers computes it: logits"


def probe_text(*, vocab_size: int, max_model_len: int) -> list[int]:
    """The text."""
    return [(37 * i + 11) % vocab_size for i in range(min(NUM_TOKENS, max_model_len))]


def paged_logits(
    model: TargetModel,
    text: list[int],
    cuts: list[int],
    *,
    block_size: int,
    has_long_rope: bool = False,
) -> FloatArray:
    """All logits [T, V] of a text, computed in pieces, empty ones left out; writes to the first
    blocks.

    Args:
        has_long_rope: whether the text is computed a second time as one that may grow long; its
            logits follow then, [2 * T, V].
    """
    if has_long_rope:
        both = [_logits_of(model, text, cuts, block_size, is_long) for is_long in (False, True)]
        return np.concatenate(both)
    return _logits_of(model, text, cuts, block_size, False)


def _logits_of(
    model: TargetModel, text: list[int], cuts: list[int], block_size: int, uses_long_rope: bool
) -> FloatArray:
    rows: list[FloatArray] = []
    for start, end in itertools.pairwise([0, *cuts, len(text)]):
        if start == end:
            continue
        layout = lay_out(
            [
                ScheduledTokens(
                    token_ids=text[start:end],
                    draft_token_ids=[],
                    num_computed_tokens=start,
                    block_table=list(range(-(-end // block_size))),
                    is_sampled=False,
                    scored_offsets=range(end - start),
                    uses_long_rope=uses_long_rope,
                )
            ],
            block_size=block_size,
        )
        step = model.launch(layout, [])
        step.wait()
        rows.append(step.result().logits_of(layout.scored_logits_indices))
    return np.concatenate(rows)


def check_difference(logits: FloatArray, expected: FloatArray, tolerance: float) -> None:
    """Compares logits [T, V] with transformers'.

    Args:
        tolerance: the largest difference of any logit, relative to the largest logit.

    Raises:
        CheckpointError: they differ by more.
    """
    if logits.shape != expected.shape:
        raise CheckpointError(f"{_REFUSAL} have shape {logits.shape}, not {expected.shape}")
    largest = float(np.abs(expected).max())
    difference = float(np.abs(logits.astype(np.float64) - expected).max())
    # Comparisons with NaN are false.
    if not difference <= tolerance * max(1.0, largest):
        raise CheckpointError(f"{_REFUSAL} differ by {difference:.3g} (largest {largest:.3g})")


def check_rounding(
    logits: FloatArray, exact: FloatArray, rounding: float, tolerance: float
) -> None:
    """Compares the distance of logits [T, V] from those in float32 with that of transformers.

    Args:
        rounding: the distance that transformers has in the model's dtype.
        tolerance: the largest distance, relative to `rounding`.

    Raises:
        CheckpointError: it is larger.
    """
    distance = distance_of(logits, exact)
    smallest = _SMALLEST_ROUNDING * float(np.abs(exact).max())
    if not distance <= tolerance * max(rounding, smallest):
        raise CheckpointError(
            f"{_REFUSAL} are {distance:.3g} away from those in float32, where rounding is "
            f"{rounding:.3g}"
        )


def distance_of(logits: FloatArray, exact: FloatArray) -> float:
    """The median over rows [T, V] of the root mean square difference from the exact row."""
    apart = logits.astype(np.float64) - exact
    return float(np.median(np.sqrt((apart**2).mean(axis=1))))
