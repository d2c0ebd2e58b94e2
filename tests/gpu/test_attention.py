"""The `triton` backend's kernels on a GPU: what tests/verifier interprets, compiled and run."""

import importlib.util

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none here"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs the package triton, and it is not installed here",
    ),
]
GPU = "cuda"
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
# Few, since each has other kernels compiled; the interpreter runs 20.
@pytest.mark.parametrize("seed", range(3))
def test_attention_is_that_of_the_definition(seed: int, dtype: torch.dtype) -> None:
    from tests.verifier.triton import triton_cases

    triton_cases.attention_is_that_of_the_definition(seed, dtype, GPU)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        "bits_do_not_depend_on_the_batch",
        "a_softcap_is_that_of_the_definition",
        "sinks_are_those_of_the_definition",
        "wide_heads_are_those_of_the_definition",
        "large_scores_do_not_overflow",
        "padding_changes_no_bit",
        "the_default_splits_are_right",
        "what_is_written_is_that_of_the_cache",
    ],
)
def test_of_every_type(case: str, dtype: torch.dtype) -> None:
    from tests.verifier.triton import triton_cases

    getattr(triton_cases, case)(dtype, GPU)


@pytest.mark.parametrize(
    "case",
    [
        "a_sequence_may_end_where_a_split_does",
        "more_heads_may_share_kv_than_a_tile_has_rows",
        "a_step_reads_its_indices_at_every_launch",
        "a_cache_may_have_more_values_than_int32_counts",
    ],
)
def test_in_float32(case: str) -> None:
    from tests.verifier.triton import triton_cases

    getattr(triton_cases, case)(GPU)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_captured_step_is_replayed_for_another_one(dtype: torch.dtype) -> None:
    from tests.verifier.triton import triton_cases

    triton_cases.a_captured_step_is_replayed(dtype, GPU)


@pytest.mark.parametrize("is_expanded", [False, True])
def test_sequences_of_a_models_step_do_not_mix(is_expanded: bool) -> None:
    from tests.verifier.triton import triton_cases

    triton_cases.sequences_of_a_models_step_do_not_mix(is_expanded, GPU)
