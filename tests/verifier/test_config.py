"""Combinations of flags that are refused."""

import os
from pathlib import Path

import pydantic
import pytest

from verifier.config import VerifierConfig


def refusal(**options: object) -> str:
    """The error message for these options."""
    with pytest.raises(pydantic.ValidationError) as caught:
        VerifierConfig(**{"model": Path("somewhere"), **options})  # type: ignore[arg-type]
    [error] = caught.value.errors()
    return error["msg"]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("threads", 1024),
        ("max_num_batched_tokens", 1 << 20),
        ("max_num_speculative_tokens", 1 << 20),
    ],
)
def test_threads_and_tokens_of_a_step_have_a_bound(name: str, most: int) -> None:
    """Beyond it, a verifier on a CPU ends in an error of the system that names no flag."""
    assert refusal(**{name: most + 1}) == f"Input should be less than or equal to {most}"


def test_every_running_sequence_has_room_in_a_step() -> None:
    message = refusal(max_num_seqs=8, max_num_batched_tokens=7)
    assert "--max-num-batched-tokens 7 is under --max-num-seqs 8" in message


def test_strict_numerics_are_for_one_process() -> None:
    message = refusal(numerics="strict", tensor_parallel_size=2)
    assert "--numerics strict is not offered with --tensor-parallel-size 2" in message


def test_a_models_name_that_no_message_can_hold_is_refused() -> None:
    """A session would fail at its first message, again and again."""
    folder = Path(os.fsdecode(b"m\xf6del"))
    expected = r"--model-id: the name 'm\udcf6del' is not text in UTF-8"
    assert expected in refusal(model=folder)
    assert expected in refusal(model_id=folder.name)
    assert VerifierConfig(model=folder, model_id="model").served_model_id() == "model"


def test_a_link_to_itself_is_a_models_name_like_another(tmp_path: Path) -> None:
    """Loading then says what is wrong with the folder."""
    link = tmp_path / "loop"
    link.symlink_to(link)
    assert VerifierConfig(model=link).served_model_id() == "loop"
