"""The engine's scores of given drafts: against transformers, and the two methods against each
other.
"""

import random

import pytest
import torch

from tandem.values import DraftWait
from tests.scripted_model import follow
from tests.verifier.paged_model import some_tokens
from tests.verifier.running_engine import (
    PATIENCE_S,
    EngineSession,
    RunningEngine,
    StartEngine,
)
from tests.verifier.scoring_engine import (
    StartScoring,
    score,
    stacked,
)
from verifier.build import LoadedModel
from verifier.engine.messages import Rejected
from verifier.engine.observation import StepRecord
from verifier.errors import ModelOutputError
from verifier.sampling import Sampling
from verifier.sampling.scored_rows import max_rows_per_step
from verifier.scheduling.sequence import Scoring, ScoringMethod
from verifier.service.score_call import (
    DraftsToScore,
    ScoreCall,
    ScoreOptions,
    SequenceScores,
)

SINGLE_PASS, EXPANSION = ScoringMethod.SINGLE_PASS, ScoringMethod.BATCH_EXPANSION
AS_IT_IS = Sampling()


def to_score(num_tokens: int, num_drafts: int, seed: int, vocab_size: int) -> DraftsToScore:
    text = some_tokens(num_tokens + num_drafts, vocab_size, seed)
    return DraftsToScore(token_ids=text[:num_tokens], draft_token_ids=text[num_tokens:])


# (prompt tokens, drafts). The prompts cross 192 tokens, where attention's shapes change, and with
# 24 tokens per step all of them are cut into chunks.
BATCHES = {
    "all with drafts": [(30, 5), (3, 1), (190, 7)],
    "mixed": [(40, 0), (30, 5), (1, 0), (195, 3), (1, 4)],
    "no drafts": [(25, 0), (1, 0), (60, 0)],
}


def make_batch(shapes: list[tuple[int, int]], vocab_size: int) -> list[DraftsToScore]:
    return [
        to_score(num_tokens, num_drafts, seed, vocab_size)
        for seed, (num_tokens, num_drafts) in enumerate(shapes)
    ]


@pytest.fixture(params=list(BATCHES.values()), ids=list(BATCHES))
def batch(request: pytest.FixtureRequest, bundled_model: LoadedModel) -> list[DraftsToScore]:
    vocab_size = bundled_model.served.vocab_size
    return make_batch(request.param, vocab_size)


def assert_equal(one: list[SequenceScores], other: list[SequenceScores]) -> None:
    """Asserts equal bits."""
    for mine, its in zip(one, other, strict=True):
        assert mine.prompt_logprobs == its.prompt_logprobs
        assert [(p.top_token_id, p.draft, p.top) for p in mine.positions] == [
            (p.top_token_id, p.draft, p.top) for p in its.positions
        ]
        for name in ("probs", "logprobs", "hidden_state"):
            assert torch.equal(stacked(mine, name), stacked(its, name)), name


class TestBothMethods:
    def test_give_the_same_bits_whole_and_in_chunks(
        self, start_scoring: StartScoring, batch: list[DraftsToScore]
    ) -> None:
        sampling = Sampling(temperature=0.7, frequency_penalty=0.4, repetition_penalty=1.3)
        results = [
            score(engine, batch, sampling=sampling, method=method, hidden_states=True,
                  prompt_logprobs=3)
            for engine in (start_scoring(), start_scoring(max_num_batched_tokens=24))
            for method in (SINGLE_PASS, EXPANSION)
        ]  # fmt: skip
        for other in results[1:]:
            assert_equal(results[0], other)

    @pytest.mark.parametrize("method", [SINGLE_PASS, EXPANSION])
    def test_change_no_other_output_and_are_not_changed_by_it(
        self, start_scoring: StartScoring, method: ScoringMethod, bundled_model: LoadedModel
    ) -> None:
        vocab_size = bundled_model.served.vocab_size
        batch = make_batch(BATCHES["mixed"], vocab_size)
        engine = start_scoring(max_num_batched_tokens=32)
        alone = score(engine, batch, method=method, hidden_states=True, prompt_logprobs=1)
        decoding, long = some_tokens(20, vocab_size, 5), some_tokens(300, vocab_size, 6)
        session = EngineSession(engine)

        def open_stream(prompt: list[int]) -> str:
            return session.open(prompt, max_new_tokens=24, sampling=Sampling(prompt_logprobs=1))

        streams = [open_stream(decoding), open_stream(long)]
        session.wait_end(streams[1])
        session.wait_end(streams[0])
        again = [
            session.open(prompt, max_new_tokens=24, draft_wait=DraftWait.NEVER,
                         sampling=Sampling(prompt_logprobs=1))
            for prompt in (decoding, long)
        ]  # fmt: skip
        output = session.output(streams[0])
        session.wait_decided(again[0], 1)
        session.hint(again[0], len(decoding) + 1, output[1:])
        beside = score(engine, batch, method=method, hidden_states=True, prompt_logprobs=1)
        assert_equal(alone, beside)
        for stream, repeated in zip(streams, again, strict=True):
            session.wait_end(repeated)
            assert session.output(repeated) == session.output(stream)
            assert session.prompt_logprobs(repeated) == session.prompt_logprobs(stream)
        session.detach()


def options(**fields: object) -> ScoreOptions:
    values = {"method": SINGLE_PASS, "num_top": 1, **fields}
    return ScoreOptions(scoring=Scoring(**values), sampling=AS_IT_IS)  # type: ignore[arg-type]


def preempt_after(steps: set[int], running: RunningEngine, patch: pytest.MonkeyPatch) -> None:
    """After these steps, does to all sequences what preemption does: drops their K/V only."""
    recorded = running.observer.stepped

    def stepped(record: StepRecord) -> None:
        recorded(record)
        if len(running.observer.steps) in steps:
            for sequence in running.engine._scheduler.running:
                sequence.num_computed_tokens = 0

    patch.setattr(running.observer, "stepped", stepped)


class TestRecomputation:
    @pytest.mark.parametrize("method", [SINGLE_PASS, EXPANSION])
    def test_a_scored_sequence_reports_each_row_once(
        self, start_engine: StartEngine, method: ScoringMethod, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        draw = random.Random(2)
        text = [draw.randrange(3) for _ in range(60)]
        running = start_engine(rule=follow([*text, 1]), max_num_batched_tokens=8)
        # Within the prompt, within the drafts, and once more before the latter are reached again.
        preempt_after({3, 10, 13}, running, monkeypatch)
        sequence = DraftsToScore(token_ids=text[:40], draft_token_ids=text[40:])
        with running.held():
            # Uses a token of some steps, so that chunks of the recomputation end elsewhere.
            running.attach().open(text[:1], max_new_tokens=12)
            call = ScoreCall(
                running.engine, [sequence], options(method=method, prompt_logprobs=True)
            )
        scores = call.result.result(PATIENCE_S)[0]
        call.close()
        running.sync()
        computed = sum(
            item.num_new_tokens
            for step in running.observer.steps
            for item in step.scheduled
            if item.sequence.scoring
        )
        assert computed > 2 * 60, "it was not computed again"
        assert [p.token_id for p in scores.prompt_logprobs] == text[1:40]
        assert [p.rank for p in scores.prompt_logprobs] == [1] * 39
        assert [p.top_token_id for p in scores.positions] == [*text[40:], 1]
        assert [p.draft and p.draft.rank for p in scores.positions] == [1] * 20 + [None]


def test_sequences_as_long_as_the_whole_pool_are_scored_also_when_cached(
    start_engine: StartEngine,
) -> None:
    running = start_engine(num_blocks=16, max_model_len=64, max_num_batched_tokens=16)
    session = running.attach()
    longest = DraftsToScore(token_ids=[1, 2] * 30, draft_token_ids=[1, 2, 1, 2])
    for _ in range(2):
        call = ScoreCall(running.engine, [longest], options())
        behind = session.open([1], max_new_tokens=2)
        [scores] = call.result.result(PATIENCE_S)
        assert len(scores.positions) == 5
        session.wait_end(behind)
        call.close()


class TestFailing:
    def test_rows_that_are_not_finite_fail_alone_and_free_everything(
        self, start_engine: StartEngine
    ) -> None:
        def rule(token_ids: list[int]) -> int | None:
            return None if token_ids[-1] == 9 else 1

        running = start_engine(rule=rule)
        session = running.attach()
        bad = DraftsToScore(token_ids=[1, 2], draft_token_ids=[9, 1])
        good = DraftsToScore(token_ids=[1, 2], draft_token_ids=[1, 1])
        call = ScoreCall(running.engine, [good, bad], options())
        with pytest.raises(ModelOutputError) as raised:
            call.result.result(PATIENCE_S)
        call.close()
        assert raised.value.field == "sequences[1]"
        streams = [
            session.open(prompt, max_new_tokens=2, sampling=Sampling(prompt_logprobs=0))
            for prompt in ([1, 9, 1, 1], [1, 1, 1])
        ]
        end = session.wait_end(streams[0])
        assert isinstance(end, Rejected)
        assert isinstance(end.error, ModelOutputError)
        session.wait_end(streams[1])
        assert session.output(streams[1]) == [1, 1]


def test_the_rows_that_a_step_scores_bound_its_logits_and_events() -> None:
    assert max_rows_per_step(vocab_size=151_936, max_logprobs=20) * 151_936 * 4 <= 128 << 20
    assert max_rows_per_step(vocab_size=2_000, max_logprobs=20) * 21 * 24 <= 128 << 10
    assert max_rows_per_step(vocab_size=10_000_000, max_logprobs=10_000) > 0


def test_by_batch_expansion_each_draft_attends_alone(start_engine: StartEngine) -> None:
    text = [i % 3 for i in range(30)]
    running = start_engine(rule=follow([*text, 1]), max_num_batched_tokens=16)
    scored = DraftsToScore(token_ids=text[:20], draft_token_ids=text[20:])
    call = ScoreCall(running.engine, [scored], options(method=EXPANSION, prompt_logprobs=True))
    [scores] = call.result.result(PATIENCE_S)
    call.close()
    running.sync()
    layouts = [step.layout for step in running.observer.steps]
    assert [layout.cu_seqlens_q.tolist() for layout in layouts] == [
        [0, 16],
        [0, *range(3, 15)],
    ]
    assert layouts[1].seq_lens.tolist() == [19, *range(20, 31)]
    assert [p.top_token_id for p in scores.positions] == [*text[20:], 1]


def test_a_step_scores_no_more_rows_than_the_limit(start_engine: StartEngine) -> None:
    running = start_engine(max_num_batched_tokens=64, max_scored_rows=10)
    session = running.attach()
    prompts = [[i % 3 for i in range(n)] for n in (35, 50)]
    with running.held():
        streams = [
            session.open(prompt, max_new_tokens=2, sampling=Sampling(prompt_logprobs=0))
            for prompt in prompts
        ]
        plain = session.open([2] * 100, max_new_tokens=2)
    for stream in (*streams, plain):
        session.wait_end(stream)
    running.sync()
    for stream, prompt in zip(streams, prompts, strict=True):
        assert [p.token_id for p in session.prompt_logprobs(stream)] == prompt[1:]
    num_rows = [len(step.layout.scored_logits_indices) for step in running.observer.steps]
    assert max(num_rows) == 10
    assert sum(num_rows) == 34 + 49
    first = running.observer.steps[0]
    assert first.stats.num_scheduled_tokens > 10, "the rest of the budget goes to others"
