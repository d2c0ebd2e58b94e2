"""What a GPU has left for K/V blocks once the largest step has run.

Weights are on the device by then. What a step takes beside them (activations, logits, copies that
an attention backend makes) depends on the model, the backend and torch's version, so it is not
computed but measured: `step_bytes` runs the two steps that take most over a few K/V blocks, which
all sequences share.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch

from servicekit.config import ConfigError
from servicekit.logs import get_logger
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, StateUse, lay_out
from verifier.batch.host_step import ComputesLogits
from verifier.checkpoint.refusals import CheckpointError
from verifier.config import VerifierConfig
from verifier.sampling.scored_rows import MAX_LOGPROBS, max_rows_per_step


@runtime_checkable
class AssumesStates(Protocol):
    """A model that may have recurrent states."""

    def assume_states(self, layout: BatchLayout) -> None:
        """Before a step that is only measured: its sequences may begin anywhere."""
        ...


PROFILE_BLOCKS = 2
"""K/V blocks of the model that is measured."""

logger = get_logger(__name__)


def free_for_kv_bytes(
    config: VerifierConfig,
    device: torch.device,
    make_model: Callable[[], ComputesLogits],
    *,
    model_limit: int,
    block_size: int,
    block_bytes: int,
    vocab_size: int,
    num_state_slots: int = 0,
) -> int:
    """Bytes of the GPU that are free beside the largest step, at least 0.

    Args:
        make_model: the model over `PROFILE_BLOCKS` blocks of K/V.
        model_limit, block_bytes: as for `choose_num_kv_blocks`.
        num_state_slots: as in `ReadyModel`.

    Raises:
        CheckpointError: the model's code fails.
        ConfigError: the largest step does not fit.
    """
    free_bytes = int(torch.cuda.mem_get_info(device)[0])
    # A flag above the model's limit is refused once the room for K/V is known.
    longest = min(
        config.max_model_len or model_limit, model_limit, free_bytes // block_bytes * block_size
    )
    layouts = list(
        largest_steps(
            config,
            longest=max(1, longest),
            block_size=block_size,
            vocab_size=vocab_size,
            num_state_slots=num_state_slots,
        )
    )
    try:
        taken_bytes = step_bytes(device, make_model, layouts)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "--max-num-batched-tokens",
            f"{config.max_num_batched_tokens}: a step at the end of {longest} tokens does not fit "
            f"into the {free_bytes >> 20} MiB beside the weights; lower it, or --max-model-len",
        ) from error
    except Exception as error:
        # Any model's code runs here and may fail in any way.
        raise CheckpointError(
            f"the model is not served: its largest step fails: {error}"
        ) from error
    # What the model and its steps left behind in torch's allocator; a model may be in a cycle.
    gc.collect()
    torch.cuda.empty_cache()
    left_bytes = int(torch.cuda.mem_get_info(device)[0]) - taken_bytes
    logger.info("step_measured", step_bytes=taken_bytes, left_bytes=left_bytes)
    return max(0, left_bytes)


def largest_steps(
    config: VerifierConfig,
    *,
    longest: int,
    block_size: int,
    vocab_size: int,
    num_state_slots: int = 0,
) -> Iterator[BatchLayout]:
    """The steps that take most memory within the flags' limits.

    One sequence fills a step with tokens at the end of the longest text, of which as many need
    logits as may in a step: those of all drafts, and rows that are scored. And as many sequences as
    may run, which have that many tokens of K/V together, verify drafts.

    Args:
        longest: tokens of the longest sequence, and of all together.
        num_state_slots: as in `ReadyModel`.
    """
    # A slot has room for no more.
    most_drafts = config.max_num_speculative_tokens if num_state_slots else None
    num_tokens = min(config.max_num_batched_tokens, longest)
    num_scored = max_rows_per_step(
        vocab_size=vocab_size, max_logprobs=MAX_LOGPROBS if config.logprobs else 0
    )
    num_rows = config.max_num_seqs * (1 + config.max_num_speculative_tokens) + num_scored
    yield _step(1, num_tokens, min(num_tokens, num_rows), longest, block_size, most_drafts)
    num_sequences = min(config.max_num_seqs, longest, num_state_slots or longest)
    share = longest // num_sequences
    most = 1 + min(config.max_num_speculative_tokens, num_tokens // num_sequences - 1)
    each = max(1, min(most, share))
    yield _step(num_sequences, each, each, share, block_size, most_drafts)


def check_largest_steps(
    config: VerifierConfig,
    model: ComputesLogits,
    *,
    longest: int,
    block_size: int,
    vocab_size: int,
    num_state_slots: int = 0,
) -> None:
    """Runs the largest steps over as many K/V blocks as the flag says, for which nothing was
    measured. Comes before any sequence: what they write to the first blocks belongs to nobody.

    Args:
        longest, num_state_slots: as in `largest_steps`.

    Raises:
        CheckpointError: the model's code fails.
        ConfigError: one does not fit.
    """
    try:
        for layout in largest_steps(
            config,
            longest=longest,
            block_size=block_size,
            vocab_size=vocab_size,
            num_state_slots=num_state_slots,
        ):
            _run(model, layout)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "--num-kv-blocks",
            f"{config.num_kv_blocks} blocks leave no memory for the largest step: {error}",
        ) from error
    except Exception as error:
        # Any model's code runs here and may fail in any way.
        raise CheckpointError(
            f"the model is not served: its largest step fails: {error}"
        ) from error


def step_bytes(
    device: torch.device, make_model: Callable[[], ComputesLogits], layouts: list[BatchLayout]
) -> int:
    """The most bytes that one of the steps takes beside weights and K/V."""
    model = make_model()
    for layout in layouts:
        # What libraries keep from their first call on is no step's.
        _run(model, layout)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for layout in layouts:
        _run(model, layout)
    return torch.cuda.max_memory_allocated(device) - before


def _run(model: ComputesLogits, layout: BatchLayout) -> None:
    if isinstance(model, AssumesStates):
        model.assume_states(layout)
    model.forward(layout)


def _step(
    num_sequences: int,
    num_tokens: int,
    num_rows: int,
    length: int,
    block_size: int,
    most_drafts: int | None,
) -> BatchLayout:
    """Sequences of one length with so many tokens each, of which the last ones need logits: the
    first of these is its last token, the rest are drafts.

    Args:
        most_drafts: of a sequence with recurrent states, whose other rows are scored; None: there
            are no such states.
    """
    num_drafts = num_rows - 1 if most_drafts is None else min(num_rows - 1, most_drafts)
    num_blocks = -(-length // block_size)
    return lay_out(
        [
            ScheduledTokens(
                token_ids=[0] * (num_tokens - num_drafts),
                draft_token_ids=[0] * num_drafts,
                num_computed_tokens=length - num_tokens,
                block_table=[block % PROFILE_BLOCKS for block in range(num_blocks)],
                scored_offsets=range(num_tokens - num_rows, num_tokens - num_drafts - 1),
                state=None if most_drafts is None else StateUse(slot),
            )
            for slot in range(num_sequences)
        ],
        block_size=block_size,
    )
