"""The path by which code outside this repository imports this function."""

from verifier.sampling import target_probs

__all__ = ["target_probs"]
