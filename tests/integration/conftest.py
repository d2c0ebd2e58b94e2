"""Fixtures of the end-to-end tests."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """More threads than free cores stall each other."""
    torch.set_num_threads(1)
