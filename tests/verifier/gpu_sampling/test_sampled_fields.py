"""No field of `Sampling` is dropped where the device samples."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.verifier.sampling_cases import some_sampling
from verifier.gpu.sampling.slots import DEVICE_FIELDS, host_fields, is_sampled_on_device
from verifier.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithOneMore(Sampling):
    typical_p: float = 1.0


def test_a_field_that_the_device_does_not_know_is_the_hosts() -> None:
    assert host_fields(_WithOneMore) == [*host_fields(Sampling), ("typical_p", 1.0)]
    for name, default in host_fields(Sampling):
        values: dict[str, Any] = {name: default + 1 if default is not None else 1}
        assert not is_sampled_on_device(Sampling(**values), frozenset()), name


def test_the_steps_that_are_compared_with_the_hosts_vary_every_field_of_the_device() -> None:
    """So one that is named, but neither put into a slot nor staged, shows there."""
    draw = np.random.default_rng(1)
    drawn = [some_sampling(draw, 50) for _ in range(100)]
    for name in DEVICE_FIELDS:
        assert len({getattr(sampling, name) for sampling in drawn}) > 1, name
