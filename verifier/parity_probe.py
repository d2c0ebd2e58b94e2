"""The load-time check that the paged model computes what transformers computes.

A short text goes through the paged model in two chunks, and through transformers' own attention
in one piece. Whatever a model does that the paged forward pass does not know of (a mask of its
own, a window handed on wrongly, state that flows between tokens outside of attention) shows as a
difference, and the model is refused. Sliding windows are longer than any text one would probe
with, so for the probe they are made short, on both sides alike.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from verifier.batch_layout import ScheduledTokens, lay_out
from verifier.checkpoint import Checkpoint, CheckpointError, reference_logits
from verifier.kv_cache import KVCache
from verifier.numerics import Numerics
from verifier.target_model import TargetModel

# Largest difference of two ways to compute the same logits, relative to the largest logit.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
_NUM_TOKENS = 48
_WINDOW_TOKENS = 16


def token_ids(*, vocab_size: int, max_model_len: int) -> list[int]:
    """The text."""
    return [(37 * i + 11) % vocab_size for i in range(min(_NUM_TOKENS, max_model_len))]


def check_parity(
    checkpoint: Checkpoint,
    model: TargetModel,
    cache: KVCache,
    numerics: Numerics,
    max_model_len: int,
    *,
    reference: torch.Tensor | None = None,
) -> None:
    """Compares the paged model with transformers' own attention; writes to the first blocks.

    Args:
        reference: of several ranks, the whole model's logits [T, V] of the text, or of a longer
            one that begins with it: a wrong cut shows too. Windows are then as they are.

    Raises:
        CheckpointError: they differ by more than rounding, or ours cannot compute it at all.
    """
    text = token_ids(vocab_size=checkpoint.vocab_size, max_model_len=max_model_len)
    num_tokens = len(text)
    first = num_tokens // 2
    layouts = []
    for start, end in ((0, first), (first, num_tokens)):
        layouts.append(
            lay_out(
                [
                    ScheduledTokens(
                        token_ids=text[start : start + 1],
                        draft_token_ids=text[start + 1 : end],
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
        with contextlib.ExitStack() as stack:
            if reference is None:
                stack.enter_context(_short_windows(checkpoint.model, max_model_len))
            rows = torch.cat([model.forward(layout) for layout in layouts])
            if reference is None:
                expected = reference_logits(checkpoint.model, text)
            else:
                expected = reference[:num_tokens].to(rows.device)
    except Exception as error:
        # Any model's code runs here, and fails in any way.
        raise CheckpointError(f"{checkpoint.architecture} is not served: {error}") from error
    difference = (rows.float() - expected.float()).abs().max().item()
    largest = expected.float().abs().max().item()
    if not difference <= _TOLERANCES[checkpoint.dtype] * max(1.0, largest):
        raise CheckpointError(
            f"{checkpoint.architecture} is not computed as transformers computes it: logits "
            f"differ by {difference:.3g} (largest {largest:.3g})"
        )


@contextlib.contextmanager
def _short_windows(model: PreTrainedModel, max_model_len: int) -> Iterator[None]:
    """Every sliding window that some sequence may outgrow is short, until the end.

    transformers' masks read it from the configuration, attention from the configuration or from
    a copy in the module; both are changed, so that a model which uses only one of them differs.
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
            if isinstance(window, int) and _WINDOW_TOKENS < window < max_model_len:
                changed.append((holder, window))
                holder.sliding_window = _WINDOW_TOKENS
        yield
    finally:
        for holder, window in changed:
            holder.sliding_window = window
