"""Packs rename tasks into rows of equal length, with targets for the loss.

Knows tasks and the tokenizer; nothing of models. Shapes: B rows per batch (16), S positions per
row (512).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from examples.demo_model.dataset import END, RenameSampler

ROW_TOKENS = 512
BATCH_ROWS = 16
PACKING_BUFFER_TASKS = 64
IGNORED = -100  # target of a position without loss


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTask:
    """Prompt, answer and end token; one row holds them whole."""

    token_ids: list[int]
    num_prompt_tokens: int


class PackedBatches:
    """Endless batches of tasks packed whole into rows.

    Tasks are drawn and encoded as they are needed rather than beforehand: a rename changes the
    tokens anyway, and both together take about 1 % of a step's time.
    """

    def __init__(self, sampler: RenameSampler, tokenizer: Tokenizer, *, answer_only: bool) -> None:
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._answer_only = answer_only
        self._waiting: list[EncodedTask] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets, both [B, S] int64; target j follows input j, or is IGNORED."""
        while True:
            rows = [self._row() for _ in range(BATCH_ROWS)]
            inputs = torch.tensor([token_ids[:-1] for token_ids, _ in rows])
            targets = torch.tensor([targets[1:] for _, targets in rows])
            yield inputs, targets

    def _row(self) -> tuple[list[int], list[int]]:
        """Token ids and targets of one row, both S + 1 long."""
        token_ids: list[int] = []
        targets: list[int] = []
        while room := ROW_TOKENS + 1 - len(token_ids):
            while len(self._waiting) < PACKING_BUFFER_TASKS:
                self._waiting.append(self._draw())
            # The oldest task opens the row, so that short ones come first in some rows too; then
            # the longest that fits. When none does, the start of one fills the row: no padding.
            choice = 0
            if token_ids:
                lengths = [len(task.token_ids) for task in self._waiting]
                fitting = [i for i, length in enumerate(lengths) if length <= room]
                choice = max(fitting, key=lengths.__getitem__, default=0)
            task = self._waiting.pop(choice)
            ignored = task.num_prompt_tokens if self._answer_only else 0
            token_ids += task.token_ids[:room]
            targets += ([IGNORED] * ignored + task.token_ids[ignored:])[:room]
        return token_ids, targets

    def _draw(self) -> EncodedTask:
        """The next task that fits a row; nearly a quarter of those of up to 30 lines do not."""
        while True:
            task = self._sampler.draw()
            prompt = self._tokenizer.encode(task.prompt).ids
            token_ids = prompt + self._tokenizer.encode(task.reference + END).ids
            if len(token_ids) <= ROW_TOKENS:
                return EncodedTask(token_ids=token_ids, num_prompt_tokens=len(prompt))
