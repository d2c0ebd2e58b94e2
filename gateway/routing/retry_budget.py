"""How many refused requests are offered to another verifier.

Owns that share: where every verifier is full, each offer only adds to the load. Pure.
"""

# A retry for every so many requests, and so many in a row after a calm time.
_REQUESTS_PER_RETRY = 5
_MAX_RETRIES = 100


class RetryBudget:
    """Retries that are left; each request adds a part of one."""

    def __init__(self) -> None:
        """Begins full."""
        self._num_left = float(_MAX_RETRIES)

    def add_request(self) -> None:
        """A request was sent to its first verifier."""
        self._num_left = min(_MAX_RETRIES, self._num_left + 1 / _REQUESTS_PER_RETRY)

    def take(self) -> bool:
        """Takes one retry; returns whether there was one."""
        if self._num_left < 1:
            return False
        self._num_left -= 1
        return True
