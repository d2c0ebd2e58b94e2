"""A stand-in for the target model: a rule over token ids instead of a network.

It stores the token ids themselves in paged memory of its own, written through the slot mapping and
read back through the block tables, as a real model stores K and V. So a wrong slot, a wrong
position or a rejected draft that is still counted shows up as a wrong next token.
"""

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np

from verifier.batch.batch_layout import BatchLayout
from verifier.batch.host_step import SampledOnHost
from verifier.batch.target_model import FloatArray

VOCAB_SIZE = 16

# From all tokens so far to the next one; None: the model fails there (NaN logits).
Rule = Callable[[list[int]], int | None]


def hashed(token_ids: list[int]) -> int:
    """A different continuation for every prefix; of three tokens, so that guesses may be right."""
    return hashlib.sha256(bytes(token_ids)).digest()[0] % 3


def follow(text: list[int]) -> Rule:
    """The token at each position, whatever came before."""
    return lambda token_ids: text[len(token_ids)]


class ScriptedModel(SampledOnHost):
    """Implements `TargetModel`: one-hot logits."""

    def __init__(
        self,
        rule: Rule,
        *,
        num_slots: int,
        block_size: int,
        vocab_size: int = VOCAB_SIZE,
        poison: frozenset[int] = frozenset(),
    ) -> None:
        """`poison`: tokens whose own K/V is not finite."""
        self.vocab_size = vocab_size
        self.rule = rule
        self._poison = list(poison)
        self._block_size = block_size
        self._memory = np.full(num_slots, -1)

    def forward(self, layout: BatchLayout) -> FloatArray:
        self._memory[layout.slot_mapping] = layout.input_token_ids
        self.kv_is_finite = ~np.isin(layout.input_token_ids, self._poison)
        logits = np.zeros((layout.num_rows, self.vocab_size), dtype=np.float32)
        known = [
            self._read(block_table, int(seq_len))
            for block_table, seq_len in zip(layout.block_tables, layout.seq_lens, strict=True)
        ]
        for row, query in enumerate(layout.logits_indices.tolist()):
            owner = int(np.searchsorted(layout.cu_seqlens_q, query, side="right")) - 1
            if row < layout.num_sampled_tokens.sum():
                ends = layout.num_sampled_tokens.cumsum()
                sequence = np.searchsorted(ends, row, side="right")
                assert owner == sequence, "another sequence's row"
            next_token_id = self.rule(known[owner][: int(layout.positions[query]) + 1])
            if next_token_id is None:
                logits[row] = np.nan
            else:
                logits[row, next_token_id] = 1.0
        return logits

    def _read(self, block_table: SequenceOf[int], num_tokens: int) -> list[int]:
        slots = [
            block_table[position // self._block_size] * self._block_size
            + position % self._block_size
            for position in range(num_tokens)
        ]
        known: list[int] = self._memory[slots].tolist()
        assert -1 not in known, "a token was never written"
        return known


def continue_by(rule: Rule, token_ids: list[int], num_tokens: int) -> list[int]:
    """The output of plain decoding."""
    known = list(token_ids)
    for _ in range(num_tokens):
        next_token_id = rule(known)
        assert next_token_id is not None
        known.append(next_token_id)
    return known[len(token_ids) :]
