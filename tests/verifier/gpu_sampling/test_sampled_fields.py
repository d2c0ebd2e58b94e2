"""No field of `Sampling` is dropped where the device samples."""

import dataclasses

import numpy as np

from tests.verifier.sampling.sampling_cases import some_sampling
from verifier.sampling import Sampling

# They choose no token.
REPORTED_FIELDS = {"logprobs", "prompt_logprobs", "logprobs_mode"}


def test_the_steps_that_are_compared_with_the_hosts_vary_every_field_that_chooses_tokens() -> None:
    """So one that is neither put into a slot nor staged shows there."""
    draw = np.random.default_rng(1)
    drawn = [some_sampling(draw, 50) for _ in range(100)]
    for field in dataclasses.fields(Sampling):
        values = {repr(getattr(sampling, field.name)) for sampling in drawn}
        assert (len(values) > 1) is (field.name not in REPORTED_FIELDS), field.name
