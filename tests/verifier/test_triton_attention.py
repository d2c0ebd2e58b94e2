"""The `triton` backend's kernels in Triton's interpreter; tests/gpu/ runs the same on a GPU.

bfloat16 is computed here by a product that stands in for the interpreter's own
(`triton_interpreter.py`), so it checks what surrounds the products only.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.verifier.triton_interpreter import interpreter
from tests.volume import cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs the package triton (extra dev), and it is not installed here",
)
Call = Callable[..., None]
ALL_TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Calls a function of `triton_cases.py` in the interpreter's process."""
    with interpreter() as calls:
        yield calls


@pytest.mark.parametrize("seed", cases(range(1, 7), range(10)))
def test_attention_is_that_of_the_definition(call: Call, seed: int) -> None:
    call("attention_is_that_of_the_definition", seed, ALL_TYPES[seed % 3])


@pytest.mark.parametrize("sliding_window", cases([25], [None, 25]))
def test_attention_is_that_of_sdpa(call: Call, sliding_window: int | None) -> None:
    call("attention_is_that_of_sdpa", sliding_window)


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize(
    "case",
    [
        "large_scores_do_not_overflow",
        "what_is_written_is_that_of_the_cache",
    ],
)
def test_of_every_type(call: Call, case: str, dtype: torch.dtype) -> None:
    call(case, dtype)


# The interpreter computes all types in float32; tiles of 16-bit ones have more rows.
@pytest.mark.parametrize("dtype", cases([torch.bfloat16], ALL_TYPES))
@pytest.mark.parametrize(
    "case",
    [
        "a_softcap_is_that_of_the_definition",
        "padding_changes_no_bit",
        "bits_do_not_depend_on_the_batch",
    ],
)
def test_of_one_type(call: Call, case: str, dtype: torch.dtype) -> None:
    call(case, dtype)


def test_a_sequence_may_end_where_a_split_does(call: Call) -> None:
    call("a_sequence_may_end_where_a_split_does")


def test_values_of_a_head_may_lie_apart(call: Call) -> None:
    call("values_of_a_head_may_lie_apart")


def test_more_heads_may_share_kv_than_a_tile_has_rows(call: Call) -> None:
    call("more_heads_may_share_kv_than_a_tile_has_rows")


def test_the_default_splits_are_right(call: Call) -> None:
    call("the_default_splits_are_right", torch.float16)


def test_a_step_reads_its_indices_at_every_launch(call: Call) -> None:
    call("a_step_reads_its_indices_at_every_launch")


def test_a_cache_may_have_more_values_than_int32_counts(call: Call) -> None:
    call("a_cache_may_have_more_values_than_int32_counts")


@pytest.mark.parametrize("name", cases(["gemma3"], ["mistral", "gemma3"]))
def test_a_models_logits_are_transformers_own(call: Call, name: str) -> None:
    call("a_models_logits_are_transformers_own", name)


@pytest.mark.parametrize("is_expanded", cases([True], [False, True]))
def test_sequences_of_a_models_step_do_not_mix(call: Call, is_expanded: bool) -> None:
    call("sequences_of_a_models_step_do_not_mix", is_expanded)


def test_a_failure_in_the_interpreters_process_is_one_here(call: Call) -> None:
    with pytest.raises(Exception, match="unsupported"):
        call("attention_is_that_of_the_definition", 0, "unsupported")
    with pytest.raises(AttributeError):
        call("no_such_case")


def test_kernels_are_not_interpreted_in_this_process(call: Call) -> None:
    from triton.runtime.jit import JITFunction

    from verifier.attention import triton_kernels

    kernels: list[Any] = [triton_kernels.attend, triton_kernels.combine, triton_kernels.write_kv]
    assert all(isinstance(kernel, JITFunction) for kernel in kernels)
