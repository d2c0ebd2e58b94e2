"""From logits to the sampled distribution, against a float64 oracle in the order of processing."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.volume import examples
from verifier.sampling import Sampling
from verifier.sampling.logits_processing import FloatArray, History, sampling_probs


def probs_one_by_one(
    logits: npt.NDArray[np.float64], sampling: Sampling
) -> npt.NDArray[np.float64]:
    """The oracle for one row: temperature, top-k, top-p, softmax; ties keep the lowest ids."""
    scaled = (logits - logits.max()) / sampling.temperature
    ranked = sorted(range(len(scaled)), key=lambda token_id: (-scaled[token_id], token_id))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    weights = {token_id: np.exp(scaled[token_id]) for token_id in ranked}
    total = sum(weights.values())
    kept: list[int] = []
    mass_before = 0.0
    for token_id in ranked:
        if kept and sampling.top_p < 1 and mass_before >= sampling.top_p * total:
            break
        kept.append(token_id)
        mass_before += weights[token_id]
    probs = np.zeros_like(scaled)
    probs[kept] = [weights[token_id] for token_id in kept]
    normalised: npt.NDArray[np.float64] = probs / probs.sum()
    return normalised


def row_probs(rows: FloatArray, sampling: Sequence[Sampling]) -> FloatArray:
    """Each row of `rows` [R, V] by the parameters of its own sequence."""
    return np.concatenate(
        [
            sampling_probs(row[None], each, History())
            for row, each in zip(rows, sampling, strict=True)
        ]
    )


def probs_of(logits: list[list[float]], **fields: float) -> npt.NDArray[np.float32]:
    sampling = Sampling(**({"temperature": 1.0} | fields))  # type: ignore[arg-type]
    rows = np.array(logits, dtype=np.float32)
    return row_probs(rows, [sampling] * len(rows))


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 14),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
)


@settings(max_examples=examples(200))
@given(
    rows=st.lists(
        st.tuples(
            # Halves only, so that ties are common and exact.
            st.lists(st.integers(-8, 8).map(lambda i: i / 2), min_size=11, max_size=11),
            SAMPLINGS,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_equals_the_oracle_row_by_row(rows: list[tuple[list[float], Sampling]]) -> None:
    logits = np.array([row for row, _ in rows], dtype=np.float32)
    probs = row_probs(logits, [sampling for _, sampling in rows])
    for row, (row_logits, sampling) in enumerate(rows):
        expected = probs_one_by_one(np.array(row_logits, dtype=np.float64), sampling)
        if is_on_the_edge(np.array(row_logits, dtype=np.float64), sampling):
            continue
        assert np.array_equal(probs[row] > 0, expected.astype(np.float32) > 0)
        np.testing.assert_allclose(probs[row], expected, rtol=1e-5, atol=1e-12)


def is_on_the_edge(logits: npt.NDArray[np.float64], sampling: Sampling) -> bool:
    """Whether rounding decides which token top-p cuts first."""
    if sampling.top_p == 1:
        return False
    almost = [
        probs_one_by_one(
            logits,
            Sampling(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=min(1.0, sampling.top_p * factor),
            ),
        )
        for factor in (1 - 1e-12, 1 + 1e-12)
    ]
    return not np.array_equal(almost[0] > 0, almost[1] > 0)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        pytest.param({"top_k": 2}, [0, 1], id="top_k"),
        pytest.param({"top_p": 0.5}, [0, 1, 2], id="top_p: 0.4 before the third"),
        pytest.param({"top_p": 0.3}, [0, 1], id="top_p: 0.2 before the second"),
        pytest.param({"top_p": 1e-9}, [0], id="top_p: the likeliest always stays"),
        pytest.param({"top_k": 9}, [0, 1, 2, 3, 4], id="top_k over the vocabulary"),
        pytest.param({"top_k": 4, "top_p": 0.5}, [0, 1], id="top_p of what top_k left"),
    ],
)
def test_equal_logits_keep_the_lowest_ids(fields: dict[str, float], kept: list[int]) -> None:
    [probs] = probs_of([[1.0] * 5], **({"top_p": 1.0} | fields))
    assert np.flatnonzero(probs).tolist() == kept


def test_equal_logits_keep_the_lowest_ids_of_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(2)
    row = torch.randint(0, 3, (20_000,), generator=generator)
    [probs] = probs_of([row.tolist()], top_k=8000)
    likeliest = np.flatnonzero(row == 2)
    second = np.flatnonzero(row == 1)[: 8000 - len(likeliest)]
    assert np.flatnonzero(probs).tolist() == sorted([*likeliest, *second])
