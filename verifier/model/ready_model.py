"""A model that is loaded and checked, whoever computes it; and the limits that its memory sets."""

from dataclasses import dataclass

from servicekit.config import ConfigError
from verifier.batch.target_model import TargetModel
from verifier.config import VerifierConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel:
    """A model ready to run. What is not explained is named as in `ServedModel`.

    Attributes:
        num_threads: that compute on a CPU.
        max_short_tokens: as in `ModelConfig`.
        num_state_slots: for recurrent states of sequences, and for snapshots of them; 0: the model
            has none.
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
    max_short_tokens: int | None = None
    num_state_slots: int = 0


def dtype_name(dtype: str, quantization: str, *, multiplies_in_fp8: bool = False) -> str:
    """The name of the arithmetic that clients are told."""
    if multiplies_in_fp8:
        return f"{dtype}, fp8 weights and activations"
    return dtype if quantization == "none" else f"{dtype}, {quantization} weights"


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
