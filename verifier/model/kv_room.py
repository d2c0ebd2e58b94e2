"""How many blocks of K/V a process has: the flag's number, or as many as memory has room for."""

from collections.abc import Callable

import torch

from verifier.batch.host_step import ComputesLogits
from verifier.config import VerifierConfig
from verifier.model.gpu_memory import PROFILE_BLOCKS, free_for_kv_bytes
from verifier.model.memory import (
    MEASURED_FRACTION,
    UNMEASURED_FRACTION,
    choose_num_kv_blocks,
    free_memory_bytes,
)


def room_for_kv_blocks(
    config: VerifierConfig,
    device: torch.device,
    make_model: Callable[[int], ComputesLogits],
    *,
    model_limit: int,
    block_size: int,
    block_bytes: int,
    vocab_size: int,
    graph_bytes: int = 0,
    num_state_slots: int = 0,
) -> int:
    """K/V blocks: the flag's, or as many as can be used and as memory has room for.

    One process on a GPU measures its largest step first. Ranks cannot: a step needs all of them,
    and each would wait for others that may still load.

    Args:
        make_model: the model over so many blocks, to measure a step.
        model_limit, block_bytes: as for `choose_num_kv_blocks`.
        num_state_slots: as in `ReadyModel`.
        graph_bytes: that a GPU shall keep for graphs, beside a step.

    Raises:
        CheckpointError: the model's code fails.
        ConfigError: the flags ask for more than the machine has.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    free_bytes: float
    fraction = UNMEASURED_FRACTION
    if device.type == "cpu":
        # All ranks take from the same memory.
        free_bytes = free_memory_bytes() / config.tensor_parallel_size
    elif config.tensor_parallel_size > 1:
        free_bytes = torch.cuda.mem_get_info(device)[0]
    else:
        fraction = MEASURED_FRACTION
        free_bytes = free_for_kv_bytes(
            config,
            device,
            lambda: make_model(PROFILE_BLOCKS),
            model_limit=model_limit,
            block_size=block_size,
            block_bytes=block_bytes,
            vocab_size=vocab_size,
            num_state_slots=num_state_slots,
        )
        free_bytes = max(0, free_bytes - graph_bytes)
    return choose_num_kv_blocks(
        config,
        model_limit=model_limit,
        block_size=block_size,
        block_bytes=block_bytes,
        free_bytes=free_bytes,
        default_fraction=fraction,
    )
