"""The sampling parameters of one sequence, also as code outside this repository has them."""

import dataclasses
from typing import Any

from tandem.values import SamplingParams

Sampling = SamplingParams


def sampling_of(parameters: object) -> SamplingParams:
    """The parameters by name from any object that has some of them.

    A None, or a message's optional field that is not set, leaves the default.
    """
    if isinstance(parameters, SamplingParams):
        return parameters
    given = {
        each.name: _given(parameters, each.name) for each in dataclasses.fields(SamplingParams)
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _given(parameters: Any, name: str) -> Any:
    try:
        if not parameters.HasField(name):
            return None
    except (AttributeError, ValueError):
        pass  # it is no message, or the field is always set
    value = getattr(parameters, name, None)
    return dict(value) if name == "logit_bias" and value is not None else value
