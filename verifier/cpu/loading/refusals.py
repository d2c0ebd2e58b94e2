"""The path by which code outside this repository imports these errors."""

from verifier.checkpoint.refusals import CheckpointError, NotServedError

__all__ = ["CheckpointError", "NotServedError"]
