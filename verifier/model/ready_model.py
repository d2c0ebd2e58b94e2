"""A model that is loaded and checked, whoever computes it; and the limits that its memory sets."""

from dataclasses import dataclass
from pathlib import Path

from servicekit.config import ConfigError
from verifier.batch.target_model import TargetModel
from verifier.config import VerifierConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel:
    """A model ready to run. What is not explained is named as in `ServedModel`.

    Attributes:
        num_threads: that compute on a CPU.
    """

    model: TargetModel
    numerics: str
    num_threads: int
    model_digest: str
    numerics_digest: str
    architecture: str
    dtype: str
    device: str
    attention_backend: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    eos_token_ids: frozenset[int]
    hidden_size: int


def choose_num_kv_blocks(
    config: VerifierConfig,
    *,
    model_limit: int,
    block_size: int,
    block_bytes: int,
    free_bytes: float,
) -> int:
    """K/V blocks: the flag's, or as many as can be used and as memory has room for.

    Args:
        model_limit: the longest sequence of the model, in tokens.
        block_bytes: of one block over all layers, K and V.
        free_bytes: of the device, for this process.

    Raises:
        ConfigError: there is no room for one.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    longest = config.max_model_len or model_limit
    num_usable = config.max_num_seqs * -(-longest // block_size)
    affordable = int(free_bytes * config.kv_memory_fraction // block_bytes)
    if affordable < 1:
        raise ConfigError("--kv-memory-fraction", "leaves no memory for the K/V cache")
    return min(num_usable, affordable)


def choose_max_model_len(config: VerifierConfig, *, model_limit: int, room: int) -> int:
    """The longest sequence that the model, the flag and the K/V cache all allow.

    Args:
        room: tokens that the K/V cache holds.
    """
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


def free_memory_bytes() -> int:
    """Of the machine.

    Raises:
        ConfigError: it is unknown.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("--num-kv-blocks", "must be set: the free memory is unknown here")
