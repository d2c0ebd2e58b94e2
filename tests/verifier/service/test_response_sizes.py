"""A step's events are split into messages that a gateway accepts."""

import pytest

from servicekit.channels.limits import MAX_MESSAGE_BYTES
from tandem.v1 import verifier_pb2
from tandem.values import TokenLogprob
from verifier.engine.messages import Decided, Event, PromptScored, StepStats
from verifier.service import event_wire

STEP = StepStats(
    step_id=7,
    num_sequences=3,
    num_scheduled_tokens=5,
    duration_s=1.0,
    draft_wait_s=0.0,
    num_running=3,
    num_waiting=0,
    num_kv_blocks_used=9,
)


def logprobs(num_tokens: int, num_tops: int) -> list[TokenLogprob]:
    tops = tuple(TokenLogprob(token_id=i, logprob=-1.5, rank=i, top=()) for i in range(num_tops))
    return [TokenLogprob(token_id=i, logprob=-0.5, rank=1, top=tops) for i in range(num_tokens)]


def decided(index: int, num_tokens: int, num_tops: int) -> Event:
    return Decided(
        sequence_id=f"{index:032x}",
        base_length=10,
        token_ids=list(range(num_tokens)),
        num_draft_tokens=31,
        num_accepted_tokens=num_tokens - 1,
        num_wanted_draft_tokens=64,
        finish_reason=None,
        logprobs=logprobs(num_tokens, num_tops),
    )


def test_a_steps_events_come_in_one_message() -> None:
    whole = event_wire.response([decided(i, 8, 0) for i in range(256)], STEP)
    assert event_wire.split(whole) == [whole]


@pytest.mark.parametrize("num_tops", [1, 20])
def test_many_logprobs_come_in_several_messages_and_all_in_order(num_tops: int) -> None:
    scored: Event = PromptScored(
        sequence_id="long", base_length=1, logprobs=logprobs(100_000 // num_tops, num_tops)
    )
    events = [decided(i, 32, num_tops) for i in range(64)]
    whole = event_wire.response([*events[:40], scored, *events[40:]], STEP)
    assert num_tops == 1 or whole.ByteSize() > 2 << 20
    parts = event_wire.split(whole)
    assert all(
        part.ByteSize() <= event_wire.MAX_RESPONSE_BYTES < MAX_MESSAGE_BYTES for part in parts
    )
    assert [part.HasField("step") for part in parts] == [True] + [False] * (len(parts) - 1)
    reported = [event for part in parts for event in part.events]
    assert [e.decided for e in reported if e.HasField("decided")] == [
        e.decided for e in whole.events if e.HasField("decided")
    ]
    joined: list[verifier_pb2.PromptScored] = [
        event.prompt_scored for event in reported if event.HasField("prompt_scored")
    ]
    assert [each.base_length for each in joined] == [
        1 + sum(len(earlier.logprobs) for earlier in joined[:index]) for index in range(len(joined))
    ]
    assert [logprob for each in joined for logprob in each.logprobs] == list(
        whole.events[40].prompt_scored.logprobs
    )
