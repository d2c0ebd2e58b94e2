"""An engine over the bundled model, and an oracle of its scores."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.verifier.running_engine import PATIENCE_S
from verifier.build import LoadedModel, build_engine
from verifier.config import VerifierConfig
from verifier.engine.engine import Engine
from verifier.sampling import Sampling
from verifier.scheduling.sequence import Scoring, ScoringMethod
from verifier.service.score_call import DraftsToScore, ScoreCall, ScoreOptions, SequenceScores
from verifier.transformers_model.checkpoint import load_checkpoint, reference_logits

StartScoring = Callable[..., Engine]


def score(
    engine: Engine,
    sequences: Sequence[DraftsToScore],
    *,
    sampling: Sampling = Sampling(),  # noqa: B008
    method: ScoringMethod = ScoringMethod.SINGLE_PASS,
    hidden_states: bool = False,
    prompt_logprobs: int | None = None,
) -> list[SequenceScores]:
    """All scores of a batch's drafts, distributions and hidden states included."""
    scoring = Scoring(
        method=method,
        num_top=prompt_logprobs or 0,
        prompt_logprobs=prompt_logprobs is not None,
        keeps_distributions=True,
        keeps_hidden_states=hidden_states,
    )
    call = ScoreCall(engine, sequences, ScoreOptions(scoring=scoring, sampling=sampling))
    try:
        return call.result.result(PATIENCE_S)
    finally:
        call.close()


def stacked(scores: SequenceScores, name: str) -> torch.Tensor:
    """One kind of tensor of all positions: [K + 1, ...]."""
    return torch.from_numpy(np.stack([getattr(position, name) for position in scores.positions]))


@contextlib.contextmanager
def started(loaded: LoadedModel, config: VerifierConfig) -> Iterator[Engine]:
    """Starts an engine; checks at the end that everything is free."""
    engine = build_engine(loaded, config, [])
    engine.start()
    try:
        yield engine
        engine.when_idle().result(PATIENCE_S)
        engine.call(engine.check_integrity).result(PATIENCE_S)
        assert engine.load.num_kv_blocks_used == 0
    finally:
        engine.stop()
        engine.stopped.result(PATIENCE_S)


@functools.cache
def _transformers_model() -> PreTrainedModel:
    """The bundled model in float32."""
    folder = Path(__file__).parents[2] / "examples/demo_model/model"
    return load_checkpoint(folder, dtype="float32", device=torch.device("cpu")).model


def oracle_logits(token_ids: list[int]) -> torch.Tensor:
    """Transformers' own logits [len(token_ids), V], through its own attention."""
    return reference_logits(_transformers_model(), token_ids)
