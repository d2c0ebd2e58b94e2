"""transformers' own generation, the baseline of the speed tables."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.workloads import Task


def generate(model: PreTrainedModel, tasks: Sequence[Task], streams: int, **options: object) -> int:
    """Runs the tasks through `generate`, in left-padded batches; returns the number of tokens."""
    return sum(len(answer) for answer in answers(model, tasks, streams, **options))


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


def generate_batch(model: PreTrainedModel, tasks: Sequence[Task], **options: object) -> int:
    """Runs the tasks through transformers' continuous batching; returns output tokens."""
    limit = max(task.max_new_tokens for task in tasks)
    outputs = cast(Any, model).generate_batch(
        [list(task.prompt_token_ids) for task in tasks],
        generation_config=GenerationConfig(
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=model.generation_config.eos_token_id,
            pad_token_id=model.generation_config.pad_token_id,
        ),
        warmup=False,
        **options,
    )
    return sum(len(output.generated_tokens) for output in outputs.values())
