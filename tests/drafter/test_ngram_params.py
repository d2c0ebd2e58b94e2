"""Which n-gram sizes are accepted."""

import pytest

from drafter.ngram.params import NgramParams, Overlap, Tie
from drafter.refusals import InvalidDeltaError


def test_defaults_are_two_to_five_disjoint_earliest() -> None:
    params = NgramParams()
    assert (params.min_ngram, params.max_ngram) == (2, 5)
    assert (params.overlap, params.tie) == (Overlap.DISJOINT, Tie.EARLIEST)


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(1, 1), (1, 32), (32, 32)])
def test_sizes_within_bounds_are_accepted(min_ngram: int, max_ngram: int) -> None:
    assert NgramParams(min_ngram=min_ngram, max_ngram=max_ngram).max_ngram == max_ngram


@pytest.mark.parametrize(
    ("min_ngram", "max_ngram", "field"),
    [
        (0, 5, "params.min_ngram"),
        (-1, 5, "params.min_ngram"),
        (2, 33, "params.max_ngram"),
        (40, 50, "params.max_ngram"),
        (6, 5, "params.max_ngram"),
        (1, 0, "params.max_ngram"),
    ],
)
def test_sizes_out_of_bounds_are_refused_by_name(
    min_ngram: int, max_ngram: int, field: str
) -> None:
    with pytest.raises(InvalidDeltaError) as refusal:
        NgramParams(min_ngram=min_ngram, max_ngram=max_ngram)
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field}: ")
