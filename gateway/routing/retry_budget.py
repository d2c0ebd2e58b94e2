"""How many refused requests are offered to another verifier.

Owns that share, by model: where every verifier of a model is full, each offer only adds to the
load, and must not take the offers of other models. Pure.
"""

# A retry for every so many requests, and so many in a row after a calm time.
_REQUESTS_PER_RETRY = 5
_MAX_RETRIES = 100
# Verifiers that come and go for months may report any number of models.
_MAX_MODELS = 1024


class RetryBudgets:
    """Retries that are left, by model; each request adds a part of one."""

    def __init__(self) -> None:
        """Begins full."""
        self._num_left: dict[str, float] = {}

    def add_request(self, model_id: str) -> None:
        """A request was sent to its first verifier."""
        num_left = self._num_left.get(model_id, _MAX_RETRIES) + 1 / _REQUESTS_PER_RETRY
        self._num_left[model_id] = min(_MAX_RETRIES, num_left)
        if len(self._num_left) > _MAX_MODELS:
            del self._num_left[next(iter(self._num_left))]

    def take(self, model_id: str) -> bool:
        """Takes one retry; returns whether there was one."""
        num_left = self._num_left.get(model_id, _MAX_RETRIES)
        if num_left < 1:
            return False
        self._num_left[model_id] = num_left - 1
        return True
