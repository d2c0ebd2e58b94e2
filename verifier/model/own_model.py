"""Whether this project's own decoder serves a model, and loads it then.

Imports neither torch nor transformers, unless there may be a GPU.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.misc.appdirs import AppDirs

from servicekit.config import ConfigError
from servicekit.logs import get_logger
from verifier.checkpoint.description import DecoderDescription, describe_decoder
from verifier.checkpoint.digests import digest_of
from verifier.checkpoint.model_config import DTYPES
from verifier.checkpoint.refusals import NotServedError
from verifier.checkpoint.weight_types import WeightType
from verifier.config import VerifierConfig
from verifier.cpu.decoder import BLOCK_SIZE, CpuDecoder
from verifier.cpu.loading.loader import load_weights
from verifier.cpu.numerics_digest import numerics_digest
from verifier.cpu.processor import TILES, unsupported_reason
from verifier.cpu.states import slot_bytes
from verifier.model.memory import (
    choose_num_kv_blocks,
    choose_num_state_slots,
    free_memory_bytes,
)
from verifier.model.ready_model import ReadyModel, choose_max_model_len, dtype_name
from verifier.parity.cpu_check import ParityCheck, Subject
from verifier.warm_up import compute_chunk, warm_up

logger = get_logger(__name__)


def find_own(config: VerifierConfig) -> DecoderDescription | None:
    """The model as the own decoder computes it; None: torch shall compute it, on a GPU
    or in transformers.

    Raises:
        CheckpointError: the folder holds no sound checkpoint.
        ConfigError: the flags ask for the own decoder, which does not serve this model.
    """
    reason = _reason_by_flags(config)
    if reason is None:
        try:
            described = describe_decoder(config.model)
        except NotServedError as error:
            reason = str(error)
        else:
            if config.quantization == "fp8" and described.stored_type is WeightType.FP8:
                raise ConfigError("--quantization", "fp8: the checkpoint's weights are FP8 already")
            return described
    runs_on_gpu = _runs_on_gpu(config)
    if config.numerics == "strict" and not runs_on_gpu:
        raise ConfigError(
            "--numerics", f"strict: is Tandem's own decoder's, which does not serve this: {reason}"
        )
    if not runs_on_gpu:
        logger.info("served_by_transformers", reason=reason)
    return None


def load_own(config: VerifierConfig, described: DecoderDescription) -> ReadyModel:
    """Loads and checks a model that `find_own` has found.

    Raises:
        CheckpointError: the check against transformers failed.
        ConfigError: the flags ask for more than the machine has.
    """
    shape = described.config
    num_threads = config.num_threads()
    other_type = described.other_type(config.dtype)
    dtype = next(name for name, weight_type in DTYPES.items() if weight_type is other_type)
    with ThreadPoolExecutor(2) as executor:
        # Beside the loading of weights and transformers' reference, which need no interpreter.
        compiled = executor.submit(
            warm_up, described.linear_type(config.dtype, config.quantization), other_type
        )
        begun = executor.submit(_begin_check, config, described, dtype, num_threads)
        try:
            weights = load_weights(described, dtype=dtype, quantization=config.quantization)
        except BaseException:
            begun.result()[1].__exit__()
            raise
        model_digest, check = begun.result()
    with check:
        compiled.result()
        if not check.is_known:
            check.verify(weights)
    # What the flag says may take the memory of files that are not used just now, too.
    free_bytes = free_memory_bytes(keeps_used_files=config.num_kv_blocks is None)
    max_drafts = min(config.max_num_speculative_tokens, config.max_num_batched_tokens)
    num_state_slots, own_bytes = 0, state_bytes(described, max_drafts)
    if own_bytes:
        num_state_slots = choose_num_state_slots(
            config, slot_bytes=own_bytes, free_bytes=free_bytes
        )
    num_kv_blocks = choose_num_kv_blocks(
        config,
        model_limit=shape.max_position_embeddings,
        block_size=BLOCK_SIZE,
        block_bytes=block_bytes(described, other_type, BLOCK_SIZE),
        free_bytes=free_bytes,
        state_bytes=num_state_slots * own_bytes,
    )
    max_model_len = choose_max_model_len(
        config, model_limit=shape.max_position_embeddings, room=num_kv_blocks * BLOCK_SIZE
    )
    try:
        model = CpuDecoder(
            weights,
            num_blocks=num_kv_blocks,
            block_size=BLOCK_SIZE,
            num_threads=num_threads,
            max_num_tokens=config.max_num_batched_tokens,
            num_state_slots=num_state_slots,
            max_drafts=max_drafts,
        )
    except MemoryError as error:
        raise ConfigError(
            "--max-num-batched-tokens",
            f"{config.max_num_batched_tokens}, with --num-kv-blocks {num_kv_blocks} and --threads "
            f"{num_threads}: {error}",
        ) from error
    compute_chunk(model, min(model.row_tile, config.max_num_batched_tokens))
    logger.info("own_decoder", tiles=TILES.name, threads=num_threads)
    return ReadyModel(
        model=model,
        numerics="strict",
        num_threads=num_threads,
        model_digest=model_digest,
        numerics_digest=numerics_digest(weights, max_model_len=max_model_len),
        architecture=shape.architecture,
        dtype=dtype_name(
            dtype,
            config.quantization if config.quantization != "none" else described.quantization,
        ),
        device="cpu",
        attention_backend="own",
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_kv_blocks,
        eos_token_ids=shape.eos_token_ids,
        hidden_size=shape.hidden_size,
        max_short_tokens=shape.max_short_tokens,
        num_state_slots=num_state_slots,
    )


def has_gpu_driver() -> bool:
    """Whether it is worth importing torch to ask it for a GPU."""
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _reason_by_flags(config: VerifierConfig) -> str | None:
    """Why the own decoder is not wanted, or cannot run here."""
    if config.numerics == "fast":
        return "--numerics fast"
    if config.tensor_parallel_size > 1:
        return "--tensor-parallel-size"
    if config.attention_backend != "auto":
        return f"--attention-backend {config.attention_backend}"
    if _runs_on_gpu(config):
        return "there is a GPU" if config.device == "auto" else "--device cuda"
    return unsupported_reason()


def _runs_on_gpu(config: VerifierConfig) -> bool:
    """Whether the model goes to a GPU; which of those there are decide is not known here."""
    if config.device == "auto":
        if not has_gpu_driver():
            return False
        import torch

        return torch.cuda.is_available()
    return config.device == "cuda"


def _begin_check(
    config: VerifierConfig, described: DecoderDescription, dtype: str, num_threads: int
) -> tuple[str, ParityCheck]:
    """The model's digest and the check of it, whose child runs beside the loading of weights."""
    model_digest = digest_of(config.model)
    subject = Subject(
        folder=config.model,
        model_digest=model_digest,
        dtype=dtype,
        quantization=config.quantization,
        max_position_embeddings=described.config.max_position_embeddings,
    )
    return model_digest, ParityCheck(subject, cache=_cache_folder(), num_threads=num_threads)


def _cache_folder() -> Path:
    """Where numba is told to keep machine code, else the user's."""
    config: Any = numba.config
    folders: Any = AppDirs
    told: str = config.CACHE_DIR
    return Path(told or folders(appname="tandem", appauthor=False).user_cache_dir)


def block_bytes(described: DecoderDescription, other_type: WeightType, block_size: int) -> int:
    """Bytes of one block's K and V, over all layers that keep some."""
    shape = described.config
    values = sum(2 * each.num_kv_heads * each.head_dim for each in shape.layers if each.has_kv)
    return int(values * block_size * np.dtype(other_type.value).itemsize)


def state_bytes(described: DecoderDescription, max_drafts: int) -> int:
    """Bytes of one sequence's recurrent states, with room for so many drafts; 0: it has none."""
    shape = described.config
    num_layers = sum(layer.is_delta for layer in shape.layers)
    return slot_bytes(shape.delta, num_layers, max_drafts) if shape.delta else 0
