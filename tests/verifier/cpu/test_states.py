"""Recurrent states: after any drafts, accepted or not, a token's logits have the bits that they
have in one pass over the text.
"""

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import RunningDecoder, some_tokens, weights_of
from tests.verifier.cpu.state_walk import NUM_SLOTS, Walk
from tests.volume import cases
from verifier.batch.batch_layout import StateUse
from verifier.checkpoint.weight_types import FloatArray

NUM_TOKENS, NUM_BLOCKS = 300, 60
MODELS = [("qwen3_next", "float32"), ("qwen3_5", "bfloat16"), ("qwen3_5_moe", "float32")]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def running(request: pytest.FixtureRequest) -> Iterator[RunningDecoder]:
    with RunningDecoder(
        weights_of(*request.param),
        num_blocks=NUM_BLOCKS,
        max_num_tokens=NUM_TOKENS,
        num_state_slots=NUM_SLOTS,
    ) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def text(running: RunningDecoder) -> list[int]:
    return some_tokens(NUM_TOKENS, running.weights.vocab_size)


@pytest.fixture(scope="module")
def expected(running: RunningDecoder, text: list[int]) -> FloatArray:
    """In one pass, by one thread."""
    return running.run_in_chunks(text, [NUM_TOKENS], list(range(NUM_BLOCKS)))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("max_drafts", cases((3, 31), (1, 2, 3, 7, 15, 31)))
def test_drafts_and_kept_states_change_no_bit(
    running: RunningDecoder,
    text: list[int],
    expected: FloatArray,
    max_drafts: int,
    num_threads: int,
) -> None:
    walk = Walk(
        text, random.Random(max_drafts), vocab_size=running.weights.vocab_size, max_num_tokens=110,
        max_drafts=max_drafts, num_blocks=NUM_BLOCKS,
    )  # fmt: skip
    with RunningDecoder(
        running.weights, num_blocks=NUM_BLOCKS, max_num_tokens=110, num_threads=num_threads,
        num_state_slots=NUM_SLOTS, max_drafts=max_drafts,
    ) as own:  # fmt: skip
        for step in walk.steps(cases(80, 400)):
            results = own.run(*(chunk for chunk, _ in step))
            for (chunk, num_right), rows in zip(step, results, strict=True):
                first = chunk.end - chunk.num_rows
                assert np.array_equal(rows[:num_right], expected[first : first + num_right])


def test_a_text_that_is_not_finite_harms_no_other() -> None:
    """Not in its slot later, either."""
    weights = weights_of("qwen3_next")
    assert isinstance(weights.embeddings, np.ndarray)
    broken = weights.embeddings.copy()
    broken[5] = np.nan
    text = [token for token in some_tokens(40, weights.vocab_size) if token != 5]
    with RunningDecoder(
        dataclasses.replace(weights, embeddings=broken), num_blocks=8, num_state_slots=2
    ) as own:
        alone = own.run(Chunk(token_ids=text, start=0, block_table=[0, 1, 2], num_rows=9))

        def chunk(tokens: list[int], slot: int) -> Chunk:
            table = [3 * slot, 3 * slot + 1, 3 * slot + 2]
            return Chunk(token_ids=tokens, start=0, block_table=table, num_rows=9,
                         state=StateUse(slot))  # fmt: skip

        together = own.run(chunk([*text[:7], 5, *text[8:]], 0), chunk(text, 1))
        assert not np.isfinite(together[0]).all()
        np.testing.assert_array_equal(together[1], alone[0])
        assert own.decoder.kv_is_finite is not None
        assert np.flatnonzero(~own.decoder.kv_is_finite).tolist() == list(range(7, len(text)))
        # A draft that is not finite and was not accepted leaves nothing.
        own.run(dataclasses.replace(chunk([*text[:20], 5], 0), num_rows=2))
        np.testing.assert_array_equal(own.run(chunk(text, 0))[0], alone[0])


@pytest.mark.parametrize(
    ("uses", "starts", "message"),
    [
        ([StateUse(0), StateUse(0)], [0, 0], "writes states twice"),
        ([StateUse(NUM_SLOTS), StateUse(0)], [0, 0], "a slot for states that there is not"),
        ([StateUse(-1), StateUse(0)], [0, 0], "a slot for states that there is not"),
        ([StateUse(0, NUM_SLOTS), StateUse(1)], [4, 0], "a slot for states that there is not"),
        ([StateUse(0), StateUse(1)], [4, 0], "goes on at token 4"),
        ([StateUse(2), StateUse(1)], [29, 0], "goes on at token 29"),
        ([StateUse(2), StateUse(1)], [33, 0], "goes on at token 33"),
        ([StateUse(0, 2), StateUse(1)], [31, 0], "goes on at token 31"),
        ([StateUse(0, 2), StateUse(2)], [30, 0], "overwrites states that it begins with"),
        ([StateUse(0, -1, ((5, 3),)), StateUse(3)], [0, 0], "writes states twice"),
        ([StateUse(0, -1, ((0, 3),)), StateUse(1)], [0, 0], "no certain token"),
        ([StateUse(0, -1, ((6, 3),)), StateUse(1)], [0, 0], "no certain token"),
        ([StateUse(0, -1, ((5, NUM_SLOTS),)), StateUse(1)], [0, 0], "no certain token"),
        ([StateUse(0, -1, ((5, 3), (4, 4))), StateUse(1)], [0, 0], "no certain token"),
        ([StateUse(0), None], [0, 0], "without a place"),
    ],
)
def test_a_layout_that_contradicts_its_states_is_refused(
    running: RunningDecoder,
    text: list[int],
    uses: list[StateUse | None],
    starts: list[int],
    message: str,
) -> None:
    """Slot 2 has states after 30 tokens, and 2 drafts; others none."""
    with RunningDecoder(
        running.weights, num_blocks=9, max_num_tokens=64, num_state_slots=NUM_SLOTS, max_drafts=2
    ) as own:
        table = [0, 1, 2]
        prompt = Chunk(
            token_ids=text[:32], start=0, block_table=table, num_rows=3, state=StateUse(2)
        )
        own.run(prompt)
        chunks = [
            Chunk(token_ids=text[:6], start=start, block_table=table, num_rows=2, state=use)
            for use, start in zip(uses, starts, strict=True)
        ]
        with pytest.raises(ValueError, match=message):
            own.run(*chunks)
        with pytest.raises(ValueError, match="3 drafts, over 2"):
            own.run(dataclasses.replace(prompt, num_rows=4))
        # Nothing has changed.
        own.run(dataclasses.replace(chunks[0], start=32, state=StateUse(2)))
