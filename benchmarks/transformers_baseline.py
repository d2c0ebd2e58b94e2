"""transformers' own generation, beside which Tandem is measured."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from benchmarks.workloads import Task


def answers(
    model: PreTrainedModel, tasks: Sequence[Task], streams: int, **options: object
) -> list[list[int]]:
    """Runs the tasks through `generate`, in left-padded batches; returns each one's tokens."""
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    # Of what a batch's mask hides.
    padding = min(ends, default=0)
    outputs: list[list[int]] = []
    for start in range(0, len(tasks), streams):
        batch = tasks[start : start + streams]
        width = max(len(task.prompt_token_ids) for task in batch)
        pads = [width - len(task.prompt_token_ids) for task in batch]
        input_ids = torch.tensor(
            [
                [padding] * pad + list(task.prompt_token_ids)
                for pad, task in zip(pads, batch, strict=True)
            ],
            device=model.device,
        )
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=model.device)
        limit = max(task.max_new_tokens for task in batch)
        output = cast(Any, model).generate(
            input_ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, **options
        )
        for row, task in zip(output[:, width:].tolist(), batch, strict=True):
            length = next((i + 1 for i, token_id in enumerate(row) if token_id in ends), len(row))
            outputs.append(row[: min(length, task.max_new_tokens)])
    return outputs
