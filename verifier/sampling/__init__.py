"""From rows of logits to tokens and logprobs: penalties, temperature, noise, acceptance of drafts.

Knows rows of logits and the parameters that belong to them; nothing of sequences or K/V.

The names below are for importers outside this repository, too.
"""

from verifier.sampling.given_noise import sample_greedy, sample_match, sample_ratio
from verifier.sampling.logits_processing import target_probs
from verifier.sampling.parameters import Sampling

__all__ = ["Sampling", "sample_greedy", "sample_match", "sample_ratio", "target_probs"]
