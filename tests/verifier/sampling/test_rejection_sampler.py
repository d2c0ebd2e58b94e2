"""Acceptance against a naive loop; the output's distribution; what drafts cannot change."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.verifier.sampling.goodness_of_fit import follows
from verifier.sampling import Sampling
from verifier.sampling.logits_processing import History, sampling_probs
from verifier.sampling.rejection_sampler import (
    PADDING,
    IntArray,
    JudgedSequence,
    Verdict,
    accept_rows,
    verify,
)


def ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def accept_one_by_one(
    samples: list[list[int]], drafts: list[list[int]]
) -> tuple[list[list[int]], list[int]]:
    """The oracle; there is one more sample than drafts."""
    outputs, num_accepted = [], []
    for sample, draft in zip(samples, drafts, strict=True):
        output: list[int] = []
        for sampled, drafted in zip(sample, [*draft, None], strict=True):
            output.append(sampled)
            if sampled != drafted:
                break
        outputs.append(output)
        num_accepted.append(len(output) - 1)
    return outputs, num_accepted


@given(
    sequences=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 3)), max_size=7).flatmap(
            lambda rows: st.integers(0, 2).map(lambda bonus: (rows, bonus))
        ),
        min_size=1,
        max_size=6,
    )
)
def test_accepts_as_the_naive_loop_does(
    sequences: list[tuple[list[tuple[int, int]], int]],
) -> None:
    samples = [[sampled for sampled, _ in rows] + [bonus] for rows, bonus in sequences]
    drafts = [[drafted for _, drafted in rows] for rows, _ in sequences]
    outputs, num_accepted, _ = accept_rows(
        ints([token for row in samples for token in row]),
        ints([token for row in drafts for token in row]),
        ints([len(row) for row in drafts]),
        np.ones(sum(map(len, samples)), dtype=np.bool_),
    )
    expected_outputs, expected_accepted = accept_one_by_one(samples, drafts)
    assert num_accepted.tolist() == expected_accepted
    assert outputs.shape == (len(drafts), max(map(len, drafts)) + 1)
    for output, expected in zip(outputs.tolist(), expected_outputs, strict=True):
        assert output == expected + [PADDING] * (len(output) - len(expected))


@given(
    sequences=st.lists(
        st.lists(
            # Sampled, drafted (of the last row: by nobody), usable.
            st.tuples(st.integers(0, 1), st.integers(0, 1), st.sampled_from([True, True, False])),
            min_size=1,
            max_size=5,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_nothing_is_accepted_from_an_unusable_row_on(
    sequences: list[list[tuple[int, int, bool]]],
) -> None:
    rows = [row for sequence in sequences for row in sequence]
    outputs, num_accepted, last_is_usable = accept_rows(
        ints([sampled for sampled, _, _ in rows]),
        ints([drafted for sequence in sequences for _, drafted, _ in sequence[:-1]]),
        ints([len(sequence) - 1 for sequence in sequences]),
        np.array([is_usable for _, _, is_usable in rows]),
    )
    for i, sequence in enumerate(sequences):
        expected: list[int] = []
        stood = 0
        for place, (sampled, drafted, is_usable) in enumerate(sequence):
            if not is_usable:
                break
            expected.append(sampled)
            if place == len(sequence) - 1 or sampled != drafted:
                break
            stood += 1
        assert num_accepted[i] == stood
        assert last_is_usable[i] == sequence[stood][2]
        assert outputs[i].tolist() == expected + [PADDING] * (outputs.shape[1] - len(expected))


def judge(
    logits: torch.Tensor,
    *,
    sampling: Sequence[Sampling],
    first_positions: IntArray,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
) -> Verdict:
    """`verify` for sequences whose history does not matter."""
    ends = np.cumsum(num_draft_tokens)
    sequences = [
        JudgedSequence(
            sampling=each,
            history=History.of(
                each,
                prompt_token_ids=(),
                output_token_ids=(),
                draft_token_ids=draft_token_ids[end - count : end].tolist(),
            ),
            first_position=int(position),
        )
        for each, position, end, count in zip(
            sampling, first_positions, ends, num_draft_tokens, strict=True
        )
    ]
    return verify(
        logits.contiguous().numpy(),
        sequences,
        draft_token_ids=draft_token_ids,
        num_draft_tokens=num_draft_tokens,
    )


def verify_one(
    logits: torch.Tensor, drafts: list[int], sampling: Sampling, first_position: int = 10
) -> tuple[list[int], int]:
    """Output tokens and number of accepted drafts of one sequence."""
    verdict = judge(
        logits,
        sampling=[sampling],
        first_positions=ints([first_position]),
        draft_token_ids=ints(drafts),
        num_draft_tokens=ints([len(drafts)]),
    )
    assert verdict.is_finite.all()
    num_accepted = int(verdict.num_accepted_tokens[0])
    return verdict.output_token_ids[0, : num_accepted + 1].tolist(), num_accepted


OUT_OF_RANGE = [-1, -(2**62), 8, 2**31, 2**32 - 1, 2**62]


class TestGreedy:
    LIKELIEST = (3, 1, 4, 1)

    @pytest.fixture
    def logits(self) -> torch.Tensor:
        rows = torch.zeros(4, 8)
        rows[range(4), list(self.LIKELIEST)] = 1.0
        return rows

    @pytest.mark.parametrize(
        ("drafts", "output"),
        [
            ([3, 1, 4], [3, 1, 4, 1]),
            ([3, 1, 5], [3, 1, 4]),
            ([3, 2, 4], [3, 1]),
            ([0, 1, 4], [3]),
            *(([3, token_id, 4], [3, 1]) for token_id in OUT_OF_RANGE),
        ],
    )
    def test_follows_the_drafts_while_they_are_the_argmax(
        self, logits: torch.Tensor, drafts: list[int], output: list[int]
    ) -> None:
        assert verify_one(logits, drafts, Sampling()) == (output, len(output) - 1)

    @pytest.mark.parametrize("vocab_size", [5, 16, 100, 5000])
    def test_the_lowest_id_wins_a_tie(self, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        # Few values, so that in nearly every row the largest occurs several times.
        logits = torch.randint(0, 3, (200, vocab_size), generator=generator).float()
        lowest = [int(np.flatnonzero(row == row.max())[0]) for row in logits.float().numpy()]
        verdict = judge(
            logits,
            sampling=[Sampling()] * 200,
            first_positions=ints([0] * 200),
            draft_token_ids=ints([]),
            num_draft_tokens=ints([0] * 200),
        )
        assert verdict.output_token_ids[:, 0].tolist() == lowest


# Logits of eight tokens, one of which the sampling parameters may cut off.
LOGITS = torch.tensor([0.0, 1.0, -1.5, 0.5, 1.2, -3.0, 0.3, -0.7])
# Enough to show a bias of two percent, see below; a likely draft hides it best.
NUM_SEQUENCES, NUM_SEQUENCES_LIKELY_DRAFT = 20_000, 60_000
LIKELY_DRAFT = 4

Sampler = Callable[[torch.Tensor, list[Sampling], IntArray, IntArray], Verdict]


def fair(
    logits: torch.Tensor, sampling: list[Sampling], drafts: IntArray, num_drafts: IntArray
) -> Verdict:
    return judge(
        logits,
        sampling=sampling,
        first_positions=np.full(len(sampling), 40),
        draft_token_ids=drafts,
        num_draft_tokens=num_drafts,
    )


def biased_by_two_percent(
    logits: torch.Tensor, sampling: list[Sampling], drafts: IntArray, num_drafts: IntArray
) -> Verdict:
    """Accepts the draft unseen in one of fifty cases. One draft per sequence."""
    verdict = fair(logits, sampling, drafts, num_drafts)
    taken = np.random.default_rng(1).random(len(sampling)) < 0.02
    outputs = verdict.output_token_ids.copy()
    outputs[taken, 0] = drafts[taken]
    return dataclasses.replace(verdict, output_token_ids=outputs)


PLAIN = Sampling(temperature=1.0)
CUT = Sampling(temperature=0.6, top_k=5, top_p=0.9)


@functools.cache
def with_seeds(sampling: Sampling, num_sequences: int) -> list[Sampling]:
    return [dataclasses.replace(sampling, seed=seed) for seed in range(num_sequences)]


def count_first_tokens(sampler: Sampler, draft: int, sampling: Sampling) -> IntArray:
    """How often each token is the first output, over many seeds, all with the same draft."""
    num_sequences = NUM_SEQUENCES_LIKELY_DRAFT if draft == LIKELY_DRAFT else NUM_SEQUENCES
    verdict = sampler(
        LOGITS.expand(2 * num_sequences, 8),
        with_seeds(sampling, num_sequences),
        np.full(num_sequences, draft),
        np.ones(num_sequences, dtype=np.int64),
    )
    return np.bincount(verdict.output_token_ids[:, 0], minlength=8)


def is_lossless(counts: IntArray, draft: int, sampling: Sampling) -> bool:
    """Whether the counts follow the distribution, by all tokens and by the draft against the
    rest.
    """
    [probs] = sampling_probs(LOGITS[None].numpy(), sampling, History()).astype(np.float64)
    if not follows(counts, probs):
        return False
    if not (0 <= draft < 8 and probs[draft] > 0):
        return True
    rest = counts.sum() - counts[draft]
    return follows([counts[draft], rest], [probs[draft], 1 - probs[draft]])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "cut"])
@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(LIKELY_DRAFT, id="the likeliest"),
        pytest.param(2, id="an unlikely one"),
        pytest.param(5, id="the least likely, or impossible"),
        pytest.param(8, id="out of range"),
        pytest.param(-(2**62), id="negative"),
    ],
)
def test_the_output_follows_the_target_distribution_whatever_the_draft(
    draft: int, sampling: Sampling
) -> None:
    assert is_lossless(count_first_tokens(fair, draft, sampling), draft, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [LIKELY_DRAFT, 2, 0])
def test_a_sampler_biased_by_two_percent_towards_the_draft_is_detected(draft: int) -> None:
    counts = count_first_tokens(biased_by_two_percent, draft, PLAIN)
    assert not is_lossless(counts, draft, PLAIN)


def test_the_token_after_an_accepted_draft_has_its_own_distribution() -> None:
    """The bonus token is sampled from its own row, independently of the row before."""
    bonus_logits = LOGITS.flip(0)
    logits = torch.stack([LOGITS, bonus_logits]).repeat(NUM_SEQUENCES, 1)
    verdict = fair(
        logits,
        with_seeds(PLAIN, NUM_SEQUENCES),
        np.full(NUM_SEQUENCES, LIKELY_DRAFT),
        np.ones(NUM_SEQUENCES, dtype=np.int64),
    )
    is_accepted = verdict.num_accepted_tokens == 1
    assert (verdict.output_token_ids[is_accepted, 0] == LIKELY_DRAFT).all()
    assert (verdict.output_token_ids[~is_accepted, 1] == PADDING).all()
    probability = torch.softmax(LOGITS.double(), dim=-1)[LIKELY_DRAFT].item()
    num_accepted = int(is_accepted.sum())
    assert follows([num_accepted, NUM_SEQUENCES - num_accepted], [probability, 1 - probability])
    counts = np.bincount(verdict.output_token_ids[is_accepted, 1], minlength=8)
    assert follows(counts, torch.softmax(bonus_logits.double(), dim=-1).numpy())


SAMPLINGS = {
    "greedy": Sampling(),
    "greedy with penalties": Sampling(repetition_penalty=1.4, presence_penalty=0.3),
    "random": Sampling(temperature=1.0, seed=3),
    "random of few": Sampling(temperature=1.3, top_k=5, top_p=0.9, min_p=0.01, seed=4),
    "random with penalties": Sampling(
        temperature=0.8, frequency_penalty=0.5, logit_bias={2: 1.0}, min_new_tokens=4, seed=5
    ),
}


def three_sequences(logits: torch.Tensor, drafts: list[int], sampling: Sampling) -> Verdict:
    """The drafts are the second sequence's; the others have one each."""
    counts = [1, len(drafts), 1]
    return judge(
        logits,
        sampling=[dataclasses.replace(sampling, logprobs=2, seed=(sampling.seed or 0) + i)
                  for i in range(3)],
        first_positions=ints([3, 4, 5]),
        draft_token_ids=ints([1, *drafts, 3]),
        num_draft_tokens=ints(counts),
    )  # fmt: skip


RIGHT_DRAFTS = [1, 5, 7]


@pytest.fixture
def logits() -> torch.Tensor:
    """Of `three_sequences`, 8 rows: under all parameters the right drafts are accepted."""
    logits = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    logits[[2, 3, 4], RIGHT_DRAFTS] += 40
    return logits


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling_name", SAMPLINGS)
class TestRowsThatAreNotFinite:
    """The second sequence has rows 2 to 5."""

    @pytest.mark.parametrize("bad_row", [2, 3, 4, 5])
    def test_end_their_sequences_output_and_no_other(
        self,
        logits: torch.Tensor,
        sampling_name: str,
        bad: float,
        bad_row: int,
    ) -> None:
        drafts = RIGHT_DRAFTS
        healthy = three_sequences(logits, drafts, SAMPLINGS[sampling_name])
        broken = logits.clone()
        broken[bad_row, 6] = bad
        verdict = three_sequences(broken, drafts, SAMPLINGS[sampling_name])
        num_left = bad_row - 2
        assert verdict.is_finite.tolist() == [True, False, True]
        assert verdict.num_accepted_tokens[1] == num_left
        assert verdict.output_token_ids[1].tolist() == [
            *drafts[:num_left],
            *[PADDING] * (4 - num_left),
        ]
        assert verdict.logprobs.get(1, []) == healthy.logprobs[1][:num_left]
        for other in (0, 2):
            assert (verdict.output_token_ids[other] == healthy.output_token_ids[other]).all()
            assert verdict.logprobs[other] == healthy.logprobs[other]


@pytest.mark.parametrize("failing", range(3))
def test_a_sequence_that_raises_costs_the_others_nothing(
    logits: torch.Tensor, failing: int
) -> None:
    judge_three = functools.partial(
        judge,
        logits,
        first_positions=ints([3, 4, 5]),
        draft_token_ids=ints([1, *RIGHT_DRAFTS, 3]),
        num_draft_tokens=ints([1, 3, 1]),
    )
    samplings = [dataclasses.replace(SAMPLINGS["random"], logprobs=2, seed=i) for i in range(3)]
    expected = judge_three(sampling=samplings)
    samplings[failing] = dataclasses.replace(samplings[failing], seed="a")  # type: ignore[arg-type]
    verdict = judge_three(sampling=samplings)
    assert list(verdict.failures) == [failing]
    for i in {0, 1, 2} - {failing}:
        assert (verdict.output_token_ids[i] == expected.output_token_ids[i]).all()
        assert verdict.num_accepted_tokens[i] == expected.num_accepted_tokens[i]
        assert verdict.is_finite[i]
        assert verdict.logprobs[i] == expected.logprobs[i]
