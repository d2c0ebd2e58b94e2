"""What is to be sent to a verifier: merged, bounded, hints first."""

from gateway.messages import CommandBatch, DraftWait, Hint, OpenCommand
from gateway.outbox import Outbox
from gateway.request import SamplingParams
from gateway.wire import commands_to_proto
from servicekit.message_limits import MessageLimits
from tandem.v1 import limits_pb2, verifier_pb2


def opening(sequence_id: str, num_tokens: int = 3) -> OpenCommand:
    return OpenCommand(
        sequence_id=sequence_id,
        token_ids=[1] * num_tokens,
        prompt_length=num_tokens,
        sampling=SamplingParams(),
        seed=1,
        max_new_tokens=10,
        stop_token_ids=(),
        ignore_eos=False,
        draft_wait=DraftWait.ADAPTIVE,
        drafting=True,
        num_speculative_tokens=7,
    )


def hint(sequence_id: str, base_length: int = 3) -> Hint:
    return Hint(sequence_id, base_length, [1] * 24, 5)


def batches_of(outbox: Outbox) -> list[CommandBatch]:
    batches = []
    while (batch := outbox.next_batch()) is not None:
        batches.append(batch)
    return batches


def test_everything_that_is_there_goes_in_one_message() -> None:
    outbox = Outbox(hint_tokens=24)
    outbox.open(opening("new"))
    outbox.hint(hint("one"))
    outbox.hint(hint("two"))
    outbox.close("old")
    outbox.update("one", True)
    (batch,) = batches_of(outbox)
    assert [hint.sequence_id for hint in batch.hints] == ["one", "two"]
    assert [command.sequence_id for command in batch.opens] == ["new"]
    assert list(batch.closes) == ["old"]
    assert list(batch.updates) == [("one", True)]
    assert outbox.is_empty


def test_of_hints_that_could_not_be_sent_the_latest_counts() -> None:
    outbox = Outbox(hint_tokens=24)
    for base_length in (3, 4, 5):
        outbox.hint(hint("one", base_length))
    (batch,) = batches_of(outbox)
    assert [hint.base_length for hint in batch.hints] == [5]


def test_a_sequence_closed_before_it_was_opened_leaves_nothing() -> None:
    outbox = Outbox(hint_tokens=24)
    outbox.open(opening("one"))
    outbox.update("one", False)
    outbox.hint(hint("one"))
    outbox.close("one")
    assert outbox.is_empty
    assert outbox.next_batch() is None


def test_a_close_takes_the_sequences_hints_with_it() -> None:
    outbox = Outbox(hint_tokens=24)
    outbox.hint(hint("one"))
    outbox.update("one", False)
    outbox.close("one")
    (batch,) = batches_of(outbox)
    assert (list(batch.hints), list(batch.updates), list(batch.closes)) == ([], [], ["one"])


def test_an_update_of_an_unsent_open_goes_into_it() -> None:
    outbox = Outbox(hint_tokens=24)
    outbox.open(opening("one"))
    outbox.update("one", False)
    (batch,) = batches_of(outbox)
    assert [command.drafting for command in batch.opens] == [False]
    assert not batch.updates


def test_long_prompts_go_in_messages_of_their_own_and_do_not_hold_up_hints() -> None:
    outbox = Outbox(hint_tokens=24)
    for name in ("a", "b", "c"):
        outbox.open(opening(name, 200_000))
    outbox.hint(hint("one"))
    batches = batches_of(outbox)
    assert [len(batch.hints) for batch in batches] == [1, 0, 0, 0]
    assert [[c.sequence_id for c in batch.opens] for batch in batches] == [[], ["a"], ["b"], ["c"]]


def test_short_prompts_share_a_message() -> None:
    outbox = Outbox(hint_tokens=24)
    for index in range(20):
        outbox.open(opening(f"{index}"))
    assert [len(batch.opens) for batch in batches_of(outbox)] == [20]


def test_more_hints_than_a_message_may_hold_are_split() -> None:
    outbox = Outbox(hint_tokens=512)
    for index in range(1000):
        outbox.hint(hint(f"{index}"))
    batches = batches_of(outbox)
    assert sum(len(batch.hints) for batch in batches) == 1000
    assert all(len(batch.hints) * 5 * 512 < 1 << 20 for batch in batches)
    assert len(batches) > 1


def test_a_broken_stream_takes_everything_with_it() -> None:
    outbox = Outbox(hint_tokens=24)
    outbox.open(opening("one"))
    outbox.hint(hint("two"))
    outbox.close("three")
    outbox.update("four", True)
    outbox.clear()
    assert outbox.is_empty


def test_a_message_holds_fewer_commands_than_a_verifier_takes_at_most() -> None:
    limits = MessageLimits(verifier_pb2.SessionRequest.DESCRIPTOR, limits_pb2)
    outbox = Outbox(hint_tokens=1)
    ids = [f"{i:032x}" for i in range(20_000)]
    for sequence_id in ids:
        outbox.update(sequence_id, False)
        outbox.hint(Hint(sequence_id, 3, [1], 5))
        outbox.open(opening(f"new {sequence_id}"))
    batches = batches_of(outbox)
    for sequence_id in ids:
        outbox.close(sequence_id)
    batches += batches_of(outbox)
    for batch in batches:
        limits.check(commands_to_proto(batch))
    assert [key for batch in batches for key, _ in batch.updates] == ids
    assert [hint.sequence_id for batch in batches for hint in batch.hints] == ids
    assert [command.sequence_id for batch in batches for command in batch.opens] == [
        f"new {sequence_id}" for sequence_id in ids
    ]
    assert [key for batch in batches for key in batch.closes] == ids
