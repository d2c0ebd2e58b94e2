"""Builds a verifier from its parts: checkpoint, K/V cache, scheduler, engine."""

import platform
import secrets
from dataclasses import dataclass

import torch

from servicekit.config import ConfigError
from servicekit.logs import get_logger
from verifier.batch.numerics import STRICT, Numerics
from verifier.batch.target_model import TargetModel
from verifier.config import VerifierConfig
from verifier.engine.engine import Engine, EngineOptions
from verifier.engine.observation import EngineObserver, Observers
from verifier.model.checkpoint import tokenizer_digest_of
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
from verifier.sampling import warm_up as sampling_warm_up
from verifier.sampling.rejection_sampler import AcceptanceRule
from verifier.sampling.scored_rows import max_rows_per_step
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.scheduler import Scheduler
from verifier.scheduling.sequence import ScoringMethod
from verifier.service.wire import ServedModel
from verifier.tensor_parallel.leader import Leader

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and its description for clients."""

    model: TargetModel
    served: ServedModel
    numerics: Numerics
    trash_slot: int


def load_model(config: VerifierConfig, leader: Leader | None = None) -> LoadedModel:
    """Loads and checks the configured checkpoint; blocks while the weights are read.

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
    max_model_len = _max_model_len(config, part, num_kv_blocks)
    if leader is not None:
        leader.begin(num_kv_blocks=num_kv_blocks, max_model_len=max_model_len)
    own_model, cache, backend = assemble(
        part, num_kv_blocks=num_kv_blocks, max_model_len=max_model_len
    )
    model = own_model if leader is None else leader.model(own_model)
    checkpoint = part.checkpoint
    probed = check_parity(
        checkpoint, model, cache, part.numerics, max_model_len, reference=part.reference
    )
    served = ServedModel(
        model_id=config.model_id or config.model.resolve().name,
        model_digest=checkpoint.model_digest,
        numerics_digest=_numerics_digest(config, part, probed),
        instance_id=secrets.token_hex(16),
        architecture=checkpoint.architecture,
        dtype=_dtype_name(checkpoint.dtype, config.quantization),
        device=device.type,
        numerics=part.numerics.name,
        attention_backend=backend.name,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_speculative_tokens=config.max_num_speculative_tokens,
        vocab_size=checkpoint.vocab_size,
        block_size=part.block_size,
        num_kv_blocks=num_kv_blocks,
        eos_token_ids=checkpoint.eos_token_ids,
        max_logprobs=config.max_logprobs if config.logprobs else None,
        allow_trace=config.allow_trace,
        tokenizer_digest=tokenizer_digest_of(config.model),
        hidden_size=checkpoint.hidden_size,
        allows_full_scores=config.allow_full_scores,
    )
    logger.info(
        "model loaded",
        architecture=served.architecture,
        dtype=served.dtype,
        device=served.device,
        numerics=served.numerics,
        threads=torch.get_num_threads(),
        max_model_len=max_model_len,
        num_kv_blocks=num_kv_blocks,
    )
    sampling_warm_up.warm_up()
    return LoadedModel(
        model=model, served=served, numerics=part.numerics, trash_slot=cache.trash_slot
    )


def build_engine(
    loaded: LoadedModel, config: VerifierConfig, observers: list[EngineObserver]
) -> Engine:
    """An engine for the model; not started."""
    observer = Observers(observers)
    served = loaded.served
    scheduler = Scheduler(
        block_pool=BlockPool(served.num_kv_blocks),
        block_size=served.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        count_hint=observer.hint_ended,
        has_prefix_cache=config.prefix_cache,
        max_scored_rows=max_rows_per_step(
            vocab_size=served.vocab_size, max_logprobs=served.max_logprobs or 0
        ),
    )
    return Engine(
        model=loaded.model,
        scheduler=scheduler,
        options=EngineOptions(
            numerics=loaded.numerics,
            trash_slot=loaded.trash_slot,
            max_model_len=served.max_model_len,
            max_num_waiting=config.max_num_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            idle_timeout_s=config.draft_idle_timeout_s,
            acceptance_rule=AcceptanceRule(config.acceptance_rule),
            verification=ScoringMethod(config.verification),
        ),
        observer=observer,
    )


def _max_model_len(config: VerifierConfig, part: ModelPart, num_kv_blocks: int) -> int:
    """The longest sequence that the model, the flag and the K/V cache all allow."""
    model_limit = part.checkpoint.max_position_embeddings
    room = num_kv_blocks * part.block_size
    if config.max_model_len is not None and config.max_model_len > room:
        raise ConfigError(
            "--max-model-len", f"{config.max_model_len}: the K/V cache holds {room} tokens"
        )
    if (config.max_model_len or 0) > model_limit:
        raise ConfigError(
            "--max-model-len",
            f"{config.max_model_len}: the model's limit is {model_limit}",
        )
    return min(config.max_model_len or model_limit, room)


def _dtype_name(dtype: torch.dtype, quantization: str) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if quantization == "none" else f"{name}, {quantization} weights"


def _numerics_digest(config: VerifierConfig, part: ModelPart, probed: Probed) -> str:
    """Empty where equal digests would not mean equal tokens: under `fast` numerics, whose bits
    depend on the batch; where `strict` ones also do on this processor; under rule `ratio`, whose
    samples depend on the drafts.
    """
    if part.numerics is not STRICT or config.acceptance_rule != AcceptanceRule.MATCH.value:
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
