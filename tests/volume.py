"""How many cases a test runs: all in `make test-long`, else a share."""

import hypothesis


def examples(number: int) -> int:
    """The share of `number` of Hypothesis's profile, see `tests/conftest.py`."""
    return max(1, number * hypothesis.settings().max_examples // 100)
