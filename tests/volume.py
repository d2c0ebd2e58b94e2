"""How many cases a test makes of its kind: all of them in `make test-long`, else a share."""

import hypothesis


def examples(number: int) -> int:
    """The share of `number` that Hypothesis's profile takes: see `tests/conftest.py`."""
    return max(1, number * hypothesis.settings().max_examples // 100)
