"""A stand-in for the target model: what it says next is a function of the position alone.

Used where a test needs the target's choices to be known in advance (the golden trace) or its law
to be exact (the sampled law). Everything around it is the real verifier.
"""

import numpy as np

from tests.scripted_model import ScriptedModel
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.host_step import SampledOnHost
from verifier.batch.target_model import FloatArray
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.service.served_model import ServedModel

_BLOCK_SIZE = 16
_NUM_KV_BLOCKS = 256


def model_of_script(script: dict[int, int], *, vocab_size: int) -> ScriptedModel:
    """Greedy at position i (0-based) of the sequence gives script[i], else token 0."""
    return ScriptedModel(
        lambda token_ids: script.get(len(token_ids), 0),
        num_slots=_NUM_KV_BLOCKS * _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        vocab_size=vocab_size,
    )


class FixedLawModel(SampledOnHost):
    """Implements `TargetModel`: the same logits at every position, whatever came before."""

    def __init__(self, logits: FloatArray) -> None:
        self.vocab_size = len(logits)
        self._logits = logits

    def forward(self, layout: BatchLayout) -> FloatArray:
        return np.tile(self._logits, (layout.num_rows, 1))


def loaded(
    model: ScriptedModel,
    config: VerifierConfig,
    *,
    max_model_len: int,
    max_num_speculative_tokens: int,
) -> LoadedModel:
    """A scripted model as a verifier serves it."""
    served = ServedModel(
        model_id="scripted",
        model_digest="scripted",
        numerics_digest="",
        instance_id="scripted",
        architecture="Scripted",
        dtype="float32",
        device="cpu",
        numerics="fast",
        attention_backend="none",
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_speculative_tokens=max_num_speculative_tokens,
        vocab_size=model.vocab_size,
        block_size=_BLOCK_SIZE,
        num_kv_blocks=_NUM_KV_BLOCKS,
        eos_token_ids=frozenset(),
        allow_trace=config.allow_trace,
    )
    return LoadedModel(model=model, served=served)
