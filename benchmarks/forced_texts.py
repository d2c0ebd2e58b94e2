"""A target model that computes what it must, and says a given text."""

from collections.abc import Sequence

import numpy as np

from benchmarks.workloads import Task
from verifier.batch.batch_layout import BatchLayout, IntArray
from verifier.batch.host_step import ComputesLogits, SampledOnHost
from verifier.batch.target_model import FloatArray

# A logit beside which no other counts.
SURE = 1e9
# Tokens that tell the prompts from each other. Prompts are longer.
_PREFIX = 64


class RecordedTexts:
    """Which token follows each row of a step by the recorded texts.

    A sequence is known by its first block, since its prompt; so there must be no prefix cache.
    """

    def __init__(self, texts: Sequence[tuple[Task, Sequence[int]]]) -> None:
        """`texts`: each task, and the text that continues its prompt."""
        longest = max(len(task.prompt_token_ids) + len(text) for task, text in texts)
        # By task; 0 behind each text's end.
        self._token_ids = np.zeros((len(texts), longest + 1), dtype=np.int64)
        self._by_prompt: dict[bytes, int] = {}
        for i, (task, text) in enumerate(texts):
            whole = [*task.prompt_token_ids, *text]
            self._token_ids[i, : len(whole)] = whole
            self._by_prompt[self._token_ids[i, :_PREFIX].tobytes()] = i
        # By a sequence's first block: its first tokens, and then its task.
        self._prefixes: dict[int, list[int]] = {}
        self._by_block: dict[int, int] = {}

    def next_token_ids(self, layout: BatchLayout) -> IntArray:
        """[R], of the layout's rows; every layout must be asked for, in order."""
        self._find_tasks(layout)
        tasks = np.array([self._by_block.get(table[0], 0) for table in layout.block_tables])
        entries = np.searchsorted(layout.cu_seqlens_q, layout.logits_indices, side="right") - 1
        positions = layout.positions[layout.logits_indices] + 1
        positions = np.minimum(positions, self._token_ids.shape[1] - 1)
        token_ids: IntArray = self._token_ids[tasks[entries], positions]
        return token_ids

    def _find_tasks(self, layout: BatchLayout) -> None:
        """Tells by their prompts which sequences have which blocks."""
        starts = layout.cu_seqlens_q
        for entry in np.flatnonzero(layout.positions[starts[:-1]] < _PREFIX).tolist():
            start, block = int(starts[entry]), layout.block_tables[entry][0]
            position = int(layout.positions[start])
            if position == 0:
                self._prefixes[block] = []
            if position < _PREFIX:
                prefix = self._prefixes[block]
                prefix += layout.input_token_ids[start : int(starts[entry + 1])].tolist()
                if len(prefix) >= _PREFIX:
                    key = np.array(prefix[:_PREFIX], dtype=np.int64).tobytes()
                    self._by_block[block] = self._by_prompt[key]


class ForcedTexts(SampledOnHost):
    """Wraps a `ComputesLogits`: the forward pass costs what it costs, and then the logits of the
    text's next token are made the largest, on the host, which samples them.
    """

    def __init__(self, model: ComputesLogits, texts: Sequence[tuple[Task, Sequence[int]]]) -> None:
        """`texts`: as `RecordedTexts` takes them."""
        self._model = model
        self.vocab_size = model.vocab_size
        self._texts = RecordedTexts(texts)

    def forward(self, layout: BatchLayout) -> FloatArray:
        logits = self._model.forward(layout)
        self.kv_is_finite = self._model.kv_is_finite
        token_ids = self._texts.next_token_ids(layout)
        logits[np.arange(len(token_ids)), token_ids] = SURE
        return logits
