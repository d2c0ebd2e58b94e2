"""How many cases a test runs: all in `make test-long`, else a share, or a choice."""

import os
from typing import TypeVar

Cases = TypeVar("Cases")


def examples(number: int) -> int:
    """The share of `number` of Hypothesis's profile, see `tests/conftest.py`."""
    import hypothesis  # Which is missing where tests of a GPU choose cases.

    return max(1, number * hypothesis.settings().max_examples // 100)


def cases(chosen: Cases, every: Cases) -> Cases:
    """`chosen` has every property that `every` has, but not every combination of them."""
    return every if "TANDEM_TEST_LONG" in os.environ else chosen
