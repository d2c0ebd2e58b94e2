"""Compiles the sampler's kernels, or loads them from disk, by sampling as an engine does."""

import numpy as np

from servicekit.kernels.jit import without_collections
from verifier.sampling.logits_processing import History, sampling_probs
from verifier.sampling.parameters import Sampling
from verifier.sampling.rejection_sampler import JudgedSequence, verify


def warm_up() -> None:
    """Takes some seconds where nothing was compiled yet."""
    with without_collections():
        _sample()


def _sample() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, frequency_penalty=0.5, logprobs=1)
    history = History.of(sampling, prompt_token_ids=[0, 1], output_token_ids=[2])
    assert history.adjustments is not None
    history.adjustments.count([0, 1, 2, 3])
    logits = np.zeros((1, 8), dtype=np.float32)
    verify(
        logits,
        [JudgedSequence(sampling=sampling, history=history, first_position=4)],
        draft_token_ids=np.zeros(0, dtype=np.int64),
        num_draft_tokens=np.zeros(1, dtype=np.int64),
    )
    sampling_probs(logits, sampling, history)
