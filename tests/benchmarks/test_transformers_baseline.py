"""transformers' answers end where the model's configuration says."""

import pytest
import torch

from benchmarks.transformers_baseline import answers
from benchmarks.workloads import Task
from tests.verifier.paged_model import make_small_model


@pytest.mark.parametrize("streams", [1, 2])
def test_an_answer_ends_at_any_of_several_end_tokens(streams: int) -> None:
    model = make_small_model("llama", torch.float32).model
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    tasks = [
        Task(prompt_token_ids=[5, 6, 7], max_new_tokens=12),
        Task(prompt_token_ids=[8, 9], max_new_tokens=12),
    ]
    model.set_attn_implementation("sdpa")
    whole = answers(model, tasks, streams)
    assert [len(answer) for answer in whole] == [12, 12]
    ends = [whole[0][4], whole[1][7]]
    model.generation_config.eos_token_id = ends
    ended = answers(model, tasks, streams)
    for answer, before in zip(ended, whole, strict=True):
        first = next(i for i, token_id in enumerate(before) if token_id in ends)
        assert answer == before[: first + 1]
