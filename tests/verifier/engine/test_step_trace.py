"""Traces of a sequence's steps, against its text and its hints."""

import random
from collections.abc import Sequence

import pytest

from tandem.v1 import sampling_pb2
from tandem.values import DraftSource, DraftWait, ProposalTrace, StepTrace
from tests.scripted_model import follow, hashed
from tests.verifier.running_engine import EngineSession, StartEngine
from verifier.drafts.draft_buffer import Hint
from verifier.drafts.hint_log import HintLog
from verifier.engine.messages import Decided, StepTraced
from verifier.scheduling.sequence import MAX_TRACED_TOKENS
from verifier.service import event_wire

ALWAYS = DraftWait.ALWAYS
TEXT = [int(digit) for digit in "314159265358979323846264338327"] * 2
BLOCK_SIZE = 4


def proposal(
    base_length: int, token_ids: Sequence[int], match_length: int = 2, *, sequence_id: str = ""
) -> Hint:
    return Hint(
        sequence_id=sequence_id,
        base_length=base_length,
        token_ids=list(token_ids),
        matched_ngram_length=match_length,
    )


def traced(hint: Hint) -> ProposalTrace:
    log = HintLog()
    log.append(hint)
    return log.drain()[0]


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def check_flow(session: EngineSession, sequence_id: str, prompt: list[int]) -> list[StepTrace]:
    """The traces of a sequence; asserts everything in them that follows from the text."""
    known = list(prompt)
    steps: list[StepTrace] = []
    events = [e for e in session.of(sequence_id) if isinstance(e, StepTraced | Decided)]
    for event, next_event in zip(events, [*events[1:], None], strict=True):
        if isinstance(event, Decided):
            continue
        step, num_drafts = event.step, len(event.step.draft_token_ids)
        computed, scheduled = step.num_computed_tokens, step.num_scheduled_tokens
        assert step.positions == tuple(range(computed, computed + scheduled))
        assert list(step.input_token_ids) == [*known, *step.draft_token_ids][computed:][:scheduled]
        offsets = [slot % BLOCK_SIZE for slot in step.slot_mapping]
        assert offsets == [position % BLOCK_SIZE for position in step.positions]
        ends = computed + scheduled == len(known) + num_drafts
        assert step.logits_indices == tuple(range(scheduled))[-num_drafts - 1 :] * ends
        assert (
            step.output_token_ids[: step.num_accepted_tokens]
            == (step.draft_token_ids[: step.num_accepted_tokens])
        )
        assert bool(step.output_token_ids) is ends
        known += step.output_token_ids
        assert step.context_length_after == len(known)
        if ends:
            assert isinstance(next_event, Decided), "its decision comes next"
            assert tuple(next_event.token_ids) == step.output_token_ids
            assert next_event.num_draft_tokens == num_drafts
            assert next_event.num_accepted_tokens == step.num_accepted_tokens
        steps.append(step)
    decided = session.decided(sequence_id)
    assert sum(bool(step.output_token_ids) for step in steps) == sum(
        bool(each.token_ids) for each in decided
    ), "each decision has its step"
    assert [s.step_id for s in steps] == sorted({s.step_id for s in steps})
    return steps


def test_a_trace_holds_the_drafts_and_the_proposals_before_them(
    start_engine: StartEngine,
) -> None:
    session = start_engine(rule=follow(TEXT)).attach()
    sequence_id = session.open(TEXT[:4], max_new_tokens=20, draft_wait=ALWAYS, trace=True)
    session.wait_decided(sequence_id, 1)
    session.hint(sequence_id, 3, [1, 2, 3])  # for an earlier length
    wrong = (TEXT[7] + 1) % 14
    session.hint(
        sequence_id, 5, [*TEXT[5:7], wrong], matched_ngram_length=9, source=DraftSource.POOL
    )
    session.wait_decided(sequence_id, 2)
    session.hint(sequence_id, 8, [])
    session.wait_decided(sequence_id, 3)
    first, second, third = check_flow(session, sequence_id, TEXT[:4])
    assert first.proposals == ()
    late, used = second.proposals
    assert late == traced(proposal(3, [1, 2, 3]))
    assert (used.token_ids, used.source) == ((*TEXT[5:7], wrong), DraftSource.POOL)
    assert used.matched_ngram_length == 9
    assert second.draft_token_ids == used.token_ids
    assert (second.num_accepted_tokens, second.output_token_ids) == (2, tuple(TEXT[5:8]))
    assert second.logits_indices == (0, 1, 2, 3)
    assert third.proposals == (traced(proposal(8, [])),)
    session.close(sequence_id)


@pytest.mark.parametrize("seed", range(4))
def test_traces_follow_the_text_through_preemption_and_any_hints(
    start_engine: StartEngine, seed: int
) -> None:
    draw = random.Random(seed)
    running = start_engine(rule=hashed, num_blocks=24, max_num_batched_tokens=12, max_num_seqs=6)
    session = running.attach()
    prompts: dict[str, list[int]] = {}
    with running.held():
        for _ in range(6):
            prompt = [draw.randrange(3) for _ in range(draw.randint(1, 30))]
            sequence_id = session.open(prompt, max_new_tokens=30, trace=True)
            prompts[sequence_id] = prompt
            session.hint(sequence_id, len(prompt), [draw.randrange(3) for _ in range(20)])
    for sequence_id in prompts:
        session.wait_end(sequence_id)
        for _ in range(3):
            session.hint(draw.choice(list(prompts)), draw.randrange(40), [0, 1, 2, 0])
    assert running.engine.load.num_preemptions > 0
    for sequence_id, prompt in prompts.items():
        assert check_flow(session, sequence_id, prompt)


def test_the_latest_of_many_proposals_are_kept() -> None:
    log = HintLog()
    for base_length in range(1000):
        log.append(proposal(base_length, [7] * 100))
    taken = log.drain()
    assert taken[-1].base_length == 999
    assert [each.base_length for each in taken] == list(range(1000 - len(taken), 1000))
    assert 10 < len(taken) <= 64
    assert sum(len(each.token_ids) for each in taken) <= 4096
    assert log.drain() == ()
    log.append(proposal(1, [7] * 8192))
    assert log.drain() == ()
    for base_length in range(1000):
        log.append(proposal(base_length, []))
    assert [each.base_length for each in log.drain()] == list(range(1000 - 64, 1000))
    for _ in range(3):
        log.append(proposal(1, [7] * 4000))
        assert len(log.drain()) == 1


def test_a_traced_prompt_comes_in_chunks_that_fit_a_message(start_engine: StartEngine) -> None:
    length = MAX_TRACED_TOKENS + 100
    prompt = [1] * length
    session = start_engine(
        num_blocks=2100, max_num_batched_tokens=8192, max_model_len=8192
    ).attach()
    sequence_id = session.open(prompt, max_new_tokens=1, trace=True)
    session.wait_end(sequence_id)
    chunks = [step.num_scheduled_tokens for step in session.traced(sequence_id)]
    assert chunks == [MAX_TRACED_TOKENS, 100]


def test_the_largest_trace_fits_a_message() -> None:
    largest = ((1 << 32) - 1,) * MAX_TRACED_TOKENS
    log = HintLog()
    for _ in range(64):
        log.append(proposal((1 << 32) - 1, largest[:64], match_length=(1 << 32) - 1))
    step = StepTrace(
        step_id=1 << 63,
        num_computed_tokens=1 << 31,
        num_scheduled_tokens=MAX_TRACED_TOKENS,
        input_token_ids=largest,
        positions=largest,
        slot_mapping=largest,
        logits_indices=tuple(range(MAX_TRACED_TOKENS)),
        draft_token_ids=largest[:512],
        num_accepted_tokens=512,
        output_token_ids=largest[:513],
        context_length_after=1 << 31,
        proposals=log.drain(),
    )
    assert len(step.proposals) == 64
    message = event_wire.response([StepTraced(sequence_id="s" * 64, step=step)], None)
    assert message.ByteSize() < event_wire.MAX_RESPONSE_BYTES
    reported = message.events[0].step_traced.step
    for name in StepTrace.__dataclass_fields__:
        if name != "proposals":
            assert getattr(reported, name) == _listed(getattr(step, name)), name
    assert reported.proposals[0] == sampling_pb2.ProposalTrace(
        base_length=(1 << 32) - 1,
        token_ids=largest[:64],
        matched_ngram_length=(1 << 32) - 1,
        source=0,  # type: ignore[arg-type]
    )
