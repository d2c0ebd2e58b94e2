"""Expansion and contraction against brute force."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from verifier.batch_expansion import DraftedSequence, contract, expand
from verifier.sampling import Sampling


def drafted(
    sequence_id: str, token_ids: list[int], drafts: list[int], block_table: list[int]
) -> DraftedSequence:
    return DraftedSequence(
        sequence_id=sequence_id,
        token_ids=token_ids,
        draft_token_ids=drafts,
        sampling=Sampling(temperature=len(token_ids)),
        block_table=block_table,
    )


def test_worked_example() -> None:
    batch = expand([drafted("a", [7, 8, 9], [4, 5], [0, 1]), drafted("b", [3], [], [2])])
    assert [(r.row_id, r.token_ids, r.num_computed_tokens) for r in batch.rows] == [
        ("b", [3], 0),
        ("a/0", [7, 8, 9], 2),
        ("a/1", [7, 8, 9, 4], 3),
        ("a/2", [7, 8, 9, 4, 5], 4),
    ]
    assert batch.places == [range(1, 4), range(1)]
    answers = torch.tensor([10, 20, 30, 40])
    assert contract(answers, batch.places, padding=-1).tolist() == [[20, 30, 40], [10, -1, -1]]


tokens = st.lists(st.integers(0, 99), min_size=1, max_size=6)
batches = st.lists(st.tuples(tokens, st.lists(st.integers(0, 99), max_size=5)), max_size=6)


@given(texts=batches)
def test_each_row_asks_what_follows_the_sequence_and_its_first_drafts(
    texts: list[tuple[list[int], list[int]]],
) -> None:
    sequences = [
        drafted(f"s{i}", token_ids, drafts, [i]) for i, (token_ids, drafts) in enumerate(texts)
    ]
    batch = expand(sequences)
    assert len({row.row_id for row in batch.rows}) == len(batch.rows), "an id is not its own"
    have_drafts = ["/" in row.row_id for row in batch.rows]
    assert have_drafts == sorted(have_drafts), "rows without drafts come first"
    for row in batch.rows:
        assert len(row.token_ids[row.num_computed_tokens :]) == 1, "one query each"
    # A stand-in for the model: the answer is everything that the row knows.
    answers = [tuple(row.token_ids) for row in batch.rows]
    for sequence, place in zip(sequences, batch.places, strict=True):
        expected = [
            tuple(sequence.token_ids + sequence.draft_token_ids[:i])
            for i in range(len(sequence.draft_token_ids) + 1)
        ]
        assert [answers[row] for row in place] == expected
        assert all(batch.rows[row].block_table is sequence.block_table for row in place)
        assert all(batch.rows[row].sampling is sequence.sampling for row in place)


@given(texts=batches)
def test_contracts_to_the_order_of_the_sequences_and_pads(
    texts: list[tuple[list[int], list[int]]],
) -> None:
    sequences = [drafted(str(i), text, drafts, []) for i, (text, drafts) in enumerate(texts)]
    batch = expand(sequences)
    # Of each row: the sum of its tokens, in two columns.
    values = torch.tensor([[sum(r.token_ids)] * 2 for r in batch.rows]).reshape(-1, 2)
    contracted = contract(values, batch.places, padding=-7)
    width = max((len(drafts) + 1 for _, drafts in texts), default=0)
    assert contracted.shape == (len(texts), width, 2)
    for index, (text, drafts) in enumerate(texts):
        for column in range(width):
            known = sum(text) + sum(drafts[:column])
            expected = known if column <= len(drafts) else -7
            assert contracted[index, column].tolist() == [expected] * 2
