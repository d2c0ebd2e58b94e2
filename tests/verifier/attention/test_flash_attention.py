"""Attention by flash-attn: layouts and arguments, against a stand-in for the GPU kernel."""

import random

import pytest
import torch

from tests.verifier.attention.flash_attention_stand_in import flash_attn_varlen_func
from tests.verifier.paged_model import CPU, PagedModel, make_small_model, some_tokens
from verifier.attention.backend import device_tables
from verifier.attention.flash_attention import FlashAttentionBackend
from verifier.batch.batch_layout import ScheduledTokens, lay_out
from verifier.transformers_model.checkpoint import reference_logits

BLOCK_SIZE = 256
BACKEND = FlashAttentionBackend(flash_attn_varlen_func, device=CPU)


@pytest.mark.stand_in
class TestAgainstTransformers:
    @pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "phi3"])
    def test_logits_are_those_of_its_own_attention(self, name: str) -> None:
        """Chunks, single tokens and drafts across a block's end, blocks scattered."""
        paged = PagedModel(
            make_small_model(name).model, backend=BACKEND, block_size=256, num_blocks=8
        )
        token_ids = some_tokens(290, paged.vocab_size)
        rows = paged.run_in_chunks(token_ids, [120, 1, 130, 8, 3], [5, 2])
        expected = reference_logits(paged.model, token_ids)
        largest = expected.abs().max().item()
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5 * largest)

    @pytest.mark.parametrize("is_expanded", [False, True])
    def test_sequences_of_a_step_do_not_mix(self, is_expanded: bool) -> None:
        paged = PagedModel(
            make_small_model("mistral").model,
            backend=BACKEND,
            block_size=BLOCK_SIZE,
            num_blocks=8,
        )
        tables = [[7, 0], [3], [1]]
        paged.check_that_sequences_do_not_mix(tables, longest=300, is_expanded=is_expanded)


def test_tables_are_int32_and_hold_what_the_layout_says() -> None:
    draw = random.Random(0)
    scheduled = [
        ScheduledTokens(
            token_ids=[1] * new,
            draft_token_ids=[2] * drafts,
            num_computed_tokens=computed,
            block_table=draw.sample(range(50), -(-(computed + new + drafts) // 4)),
        )
        for new, drafts, computed in ((1, 3, 10), (9, 0, 0), (1, 0, 30))
    ]
    layout = lay_out(scheduled, block_size=4)
    tables = device_tables(layout, CPU)
    assert tables.counts.tolist() == [3, 14, 31]
    assert tables.cu_seqlens_q.tolist() == [0, 4, 13, 14]
    assert tables.seq_lens.tolist() == [14, 9, 31]
    assert tables.table_rows.tolist() == [0, 1, 2]
    assert tables.longest_k == 31
    assert tables.block_tables.shape == (3, 8)
    for row, item in zip(tables.block_tables.tolist(), scheduled, strict=True):
        assert row == [*item.block_table, *[0] * (8 - len(item.block_table))]
    for field in ("counts", "cu_seqlens_q", "seq_lens", "table_rows", "block_tables"):
        assert getattr(tables, field).dtype is torch.int32
