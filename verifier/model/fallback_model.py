"""Loads and checks a model that torch computes: the decoder for GPUs, or transformers."""

import torch

from verifier.config import VerifierConfig
from verifier.model.gpu_memory import check_largest_steps
from verifier.model.gpu_model import find_on_gpu, load_on_gpu
from verifier.model.model_part import assemble, choose_device, load_part, room_for_part
from verifier.model.ready_model import ReadyModel, choose_max_model_len, dtype_name
from verifier.parity.transformers_check import check_parity
from verifier.tensor_parallel.leader import Leader
from verifier.transformers_model.fp8_weights import multiplies_in_fp8


def load_fallback(config: VerifierConfig, leader: Leader | None) -> ReadyModel:
    """Loads and checks the configured checkpoint.

    Args:
        leader: if this process is rank 0 of several.

    Raises:
        CheckpointError: it cannot be served.
        ConfigError: the flags ask for more than the machine has.
        RankLostError: another rank is lost.
    """
    device = choose_device(config, rank=0)
    if device.type == "cuda" and (described := find_on_gpu(config, device)) is not None:
        return load_on_gpu(config, described, device)
    assert config.numerics != "strict", "refused by find_own or find_on_gpu"
    if leader is None:
        part = load_part(config, device=device, collectives=None)
        num_kv_blocks = room_for_part(config, part)
    else:
        part = load_part(config, device=device, collectives=leader.connect(device=device))
        elsewhere = leader.load_others(part.identity())
        num_kv_blocks = min(elsewhere, room_for_part(config, part))
    checkpoint = part.checkpoint
    max_model_len = choose_max_model_len(
        config,
        model_limit=checkpoint.max_position_embeddings,
        room=num_kv_blocks * part.block_size,
    )
    if leader is not None:
        leader.begin(num_kv_blocks=num_kv_blocks)
    own_part = assemble(part, num_kv_blocks=num_kv_blocks)
    model = own_part if leader is None else leader.model(own_part)
    check_parity(
        checkpoint,
        model,
        block_size=part.block_size,
        max_model_len=max_model_len,
        reference=part.reference,
    )
    if device.type == "cuda" and leader is None and config.num_kv_blocks is not None:
        check_largest_steps(
            config,
            own_part,
            longest=max_model_len,
            block_size=part.block_size,
            vocab_size=checkpoint.vocab_size,
        )
    return ReadyModel(
        model=model,
        numerics="fast",
        num_threads=torch.get_num_threads(),
        model_digest=checkpoint.model_digest,
        # Bits depend on the batch.
        numerics_digest="",
        architecture=checkpoint.architecture,
        dtype=dtype_name(
            str(checkpoint.dtype).removeprefix("torch."),
            config.quantization,
            multiplies_in_fp8=multiplies_in_fp8(device, config.quantization),
        ),
        device=device.type,
        attention_backend=part.attention.name,
        max_model_len=max_model_len,
        vocab_size=checkpoint.vocab_size,
        block_size=part.block_size,
        num_kv_blocks=num_kv_blocks,
        eos_token_ids=checkpoint.eos_token_ids,
        hidden_size=checkpoint.hidden_size,
    )
