"""Loads and checks a model that transformers computes."""

import platform

import torch

from servicekit.logs import get_logger
from verifier.batch.numerics import STRICT
from verifier.config import VerifierConfig
from verifier.model.model_part import (
    ModelPart,
    assemble,
    choose_device,
    load_part,
    room_for_kv_blocks,
    wants_strict,
)
from verifier.model.numerics_digest import numerics_digest
from verifier.model.parity_probe import Probed, check_parity
from verifier.model.ready_model import ReadyModel, choose_max_model_len
from verifier.tensor_parallel.leader import Leader

logger = get_logger(__name__)


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
    if leader is None:
        part = load_part(config, device=device, collectives=None)
        num_kv_blocks = room_for_kv_blocks(config, part)
    else:
        is_ordered = wants_strict(config, device)
        collectives = leader.connect(device=device, is_ordered=is_ordered)
        part = load_part(config, device=device, collectives=collectives)
        elsewhere = leader.load_others(part.identity())
        num_kv_blocks = min(elsewhere, room_for_kv_blocks(config, part))
    checkpoint = part.checkpoint
    max_model_len = choose_max_model_len(
        config,
        model_limit=checkpoint.max_position_embeddings,
        room=num_kv_blocks * part.block_size,
    )
    if leader is not None:
        leader.begin(num_kv_blocks=num_kv_blocks, max_model_len=max_model_len)
    own_model, cache, backend = assemble(
        part, num_kv_blocks=num_kv_blocks, max_model_len=max_model_len
    )
    model = own_model if leader is None else leader.model(own_model)
    probed = check_parity(
        checkpoint, model, cache, part.numerics, max_model_len, reference=part.reference
    )
    return ReadyModel(
        model=model,
        numerics=part.numerics,
        trash_slot=cache.trash_slot,
        num_threads=torch.get_num_threads(),
        model_digest=checkpoint.model_digest,
        numerics_digest=_numerics_digest(config, part, probed),
        architecture=checkpoint.architecture,
        dtype=_dtype_name(checkpoint.dtype, config.quantization),
        device=device.type,
        attention_backend=backend.name,
        max_model_len=max_model_len,
        vocab_size=checkpoint.vocab_size,
        block_size=part.block_size,
        num_kv_blocks=num_kv_blocks,
        eos_token_ids=checkpoint.eos_token_ids,
        hidden_size=checkpoint.hidden_size,
    )


def _dtype_name(dtype: torch.dtype, quantization: str) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if quantization == "none" else f"{name}, {quantization} weights"


def _numerics_digest(config: VerifierConfig, part: ModelPart, probed: Probed) -> str:
    """Empty where equal digests would not mean equal tokens: under `fast` numerics, whose bits
    depend on the batch; where `strict` ones also do on this processor; under rule `ratio`, whose
    samples depend on the drafts.
    """
    if part.numerics is not STRICT or config.acceptance_rule != "match":
        return ""
    if not probed.is_repeatable:
        logger.warning("strict_numerics_do_not_hold", processor=platform.processor())
        return ""
    return numerics_digest(
        dtype=part.checkpoint.dtype,
        quantization=config.quantization,
        numerics=part.numerics.name,
        attention_backend=part.attention.name,
        tensor_parallel_size=config.tensor_parallel_size,
        probe_logits=probed.logits,
    )
