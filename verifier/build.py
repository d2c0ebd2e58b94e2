"""Builds a verifier from its parts: checkpoint, K/V cache, scheduler, engine."""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servicekit.kernels.compile_log import compilations_logged
from servicekit.logs import get_logger
from verifier.batch.target_model import TargetModel
from verifier.checkpoint.digests import tokenizer_digest_of
from verifier.checkpoint.end_tokens import with_tokenizers_end_token
from verifier.config import VerifierConfig
from verifier.drafters.drafters import Drafters
from verifier.drafters.messages import DrafterMessage, Link
from verifier.drafts.depth_policy import DepthPolicy
from verifier.engine.engine import Engine, EngineOptions
from verifier.engine.observation import EngineObserver, Observers
from verifier.model.own_model import find_own, load_own
from verifier.sampling.scored_rows import MAX_LOGPROBS, max_rows_per_step
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.scheduler import Scheduler
from verifier.service.served_model import ServedModel
from verifier.warm_up import warm_up_engine

if TYPE_CHECKING:
    from verifier.tensor_parallel.leader import Leader

# For a draft of a sequence that was opened with DRAFT_WAIT_ALWAYS.
_DRAFT_TIMEOUT_S = 30.0

logger = get_logger(__name__)

# From a drafter's address, and what is to be called with everything that its link reports.
OpenLink = Callable[[str, Callable[[DrafterMessage], None]], Link]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and its description for clients; `max_short_tokens` as in
    `ModelConfig`, `num_state_slots` as in `ReadyModel`.
    """

    model: TargetModel
    served: ServedModel
    max_short_tokens: int | None = None
    num_state_slots: int = 0


def load_model(config: VerifierConfig, leader: "Leader | None" = None) -> LoadedModel:
    """Loads and checks the configured checkpoint; blocks while the weights are read.

    Args:
        leader: if this process is rank 0 of several.

    Raises:
        CheckpointError: it cannot be served.
        ConfigError: the flags ask for more than the machine has.
        RankLostError: another rank is lost.
    """
    with compilations_logged(logger):
        if (described := find_own(config)) is not None:
            ready = load_own(config, described)
        else:
            # torch and transformers take seconds and hundreds of megabytes.
            from verifier.model.fallback_model import load_fallback

            ready = load_fallback(config, leader)
            warm_up_engine()
    eos_token_ids = with_tokenizers_end_token(config.model, ready.eos_token_ids)
    served = ServedModel(
        model_id=config.served_model_id(),
        model_digest=ready.model_digest,
        numerics_digest=_with_end_tokens(ready.numerics_digest, eos_token_ids),
        instance_id=secrets.token_hex(16),
        architecture=ready.architecture,
        dtype=ready.dtype,
        device=ready.device,
        numerics=ready.numerics,
        attention_backend=ready.attention_backend,
        max_model_len=ready.max_model_len,
        max_num_seqs=_max_num_seqs(config, ready.num_state_slots),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_speculative_tokens=config.max_num_speculative_tokens,
        vocab_size=ready.vocab_size,
        block_size=ready.block_size,
        num_kv_blocks=ready.num_kv_blocks,
        eos_token_ids=eos_token_ids,
        max_logprobs=MAX_LOGPROBS if config.logprobs else None,
        allow_trace=config.allow_trace,
        tokenizer_digest=tokenizer_digest_of(config.model),
        hidden_size=ready.hidden_size,
        allows_full_scores=config.score == "full",
    )
    logger.info(
        "model loaded",
        model_digest=served.model_digest,
        architecture=served.architecture,
        dtype=served.dtype,
        device=served.device,
        numerics=served.numerics,
        threads=ready.num_threads,
        max_model_len=ready.max_model_len,
        num_kv_blocks=ready.num_kv_blocks,
        **({"num_state_slots": ready.num_state_slots} if ready.num_state_slots else {}),
    )
    return LoadedModel(
        model=ready.model,
        served=served,
        max_short_tokens=ready.max_short_tokens,
        num_state_slots=ready.num_state_slots,
    )


def _max_num_seqs(config: VerifierConfig, num_state_slots: int) -> int:
    """Sequences that run at a time: each has a slot for its states, if the model has them."""
    return min(config.max_num_seqs, num_state_slots) if num_state_slots else config.max_num_seqs


def _with_end_tokens(numerics_digest: str, eos_token_ids: frozenset[int]) -> str:
    """A numerics digest that differs where texts end by themselves at other tokens: some come from
    files that the model's digest does not cover. "" stays "".
    """
    if not numerics_digest:
        return ""
    return hashlib.sha256(f"{numerics_digest} {sorted(eos_token_ids)}".encode()).hexdigest()


def build_engine(
    loaded: LoadedModel,
    config: VerifierConfig,
    observers: list[EngineObserver],
    open_link: OpenLink | None = None,
) -> Engine:
    """An engine for the model; not started.

    Args:
        open_link: begins to connect to a drafter; None: there is none.
    """
    observer = Observers(observers)
    served = loaded.served

    def open_drafter(address: str) -> Link:
        assert open_link is not None, "no session can name a drafter"
        return open_link(address, engine.submit)

    drafters = Drafters(
        open_link=open_drafter,
        vocab_size=served.vocab_size,
        unused_timeout_s=config.drafter_idle_timeout_s,
        count_fault=observer.drafter_failed,
    )
    scheduler = Scheduler(
        block_pool=BlockPool(served.num_kv_blocks),
        block_size=served.block_size,
        max_num_seqs=_max_num_seqs(config, loaded.num_state_slots),
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_state_slots=loaded.num_state_slots,
        has_prefix_cache=config.prefix_cache,
        max_scored_rows=max_rows_per_step(
            vocab_size=served.vocab_size, max_logprobs=served.max_logprobs or 0
        ),
        depth_policy=DepthPolicy(
            max_rows=config.max_num_batched_tokens,
            max_depth=config.max_num_speculative_tokens,
        )
        if config.speculation_depth == "learned"
        else None,
    )
    engine = Engine(
        model=loaded.model,
        scheduler=scheduler,
        drafters=drafters,
        options=EngineOptions(
            max_model_len=served.max_model_len,
            max_num_waiting=config.max_num_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            draft_timeout_s=_DRAFT_TIMEOUT_S,
            max_short_tokens=loaded.max_short_tokens,
        ),
        observer=observer,
    )
    return engine
