"""Triton's interpreter, where there is no GPU: it must be chosen before triton is imported."""

import os
import sys

import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
        "triton was imported to compile; run these tests in a process of their own"
    )
    os.environ["TRITON_INTERPRET"] = "1"
