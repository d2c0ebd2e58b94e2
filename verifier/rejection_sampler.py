"""The path by which code outside this repository imports these functions."""

from verifier.sampling import sample_greedy, sample_match, sample_ratio

__all__ = ["sample_greedy", "sample_match", "sample_ratio"]
