"""The path by which code outside this repository imports this function."""

from verifier.checkpoint.model_config import read_model_config

__all__ = ["read_model_config"]
