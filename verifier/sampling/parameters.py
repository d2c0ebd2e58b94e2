"""Sampling parameters of one sequence: validated, with defaults filled in."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a sequence's tokens are chosen. `sampling.proto` documents the fields."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    # (token id, what is added to its logit), each id once.
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_new_tokens: int = 0
    # None: no logprobs. 0: logprobs of the output tokens only. n: also of the n likeliest.
    logprobs: int | None = None
    # Logprobs of the prompt, in the same way.
    prompt_logprobs: int | None = None
    # Logprobs of the model's unadjusted distribution, not of the one that is sampled.
    raw_logprobs: bool = False
    # Whether the output follows a grammar, which the sequence has.
    is_constrained: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether penalties depend on the sequence's tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change before the temperature is applied."""
        return (
            self.counts_tokens
            or bool(self.logit_bias)
            or self.min_new_tokens > 0
            or self.is_constrained
        )

    @classmethod
    def of(cls, parameters: object) -> "Sampling":
        """Copies the fields by name from any object that has some of them.

        A None, or a message's optional field that is not set, leaves the default.
        """
        if isinstance(parameters, cls):
            return parameters
        given: dict[str, Any] = {}
        has_field = getattr(parameters, "HasField", None)
        for each in dataclasses.fields(cls):
            value = getattr(parameters, each.name, None)
            if has_field is not None and each.name in _OPTIONAL_IN_MESSAGES:
                value = value if has_field(each.name) else None
            if value is not None:
                given[each.name] = value
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = tuple(bias.items())
        return cls(**given)


_OPTIONAL_IN_MESSAGES = frozenset(
    {"top_p", "repetition_penalty", "seed", "logprobs", "prompt_logprobs"}
)
