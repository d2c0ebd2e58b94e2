"""The limits of K."""

import pytest

from verifier.drafts.draft_limits import num_drafts_trusted, num_drafts_useful


@pytest.mark.parametrize(
    ("tokens_per_match", "match_length", "expected"),
    [(0, 9, None), (2, 9, 18), (3, 1, 3), pytest.param(2, 0, 2, id="nobody said how far")],
)
def test_the_number_of_drafts_follows_the_match(
    tokens_per_match: int, match_length: int, expected: int | None
) -> None:
    assert (
        num_drafts_trusted(tokens_per_match=tokens_per_match, match_length=match_length) == expected
    )


STOPS = frozenset({7, 8})


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        pytest.param([1, 2, 3], 3, id="no stop token"),
        pytest.param([1, 7, 3, 8], 1, id="those before the first"),
        pytest.param([8, 1], 0, id="nothing is left"),
        pytest.param([], 0, id="nothing was there"),
    ],
)
def test_drafts_end_before_a_stop_token(drafts: list[int], expected: int) -> None:
    assert num_drafts_useful(drafts, stop_token_ids=STOPS) == expected
