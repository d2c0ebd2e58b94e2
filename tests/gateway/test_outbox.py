"""Commands for a verifier are merged, bounded, and hints are never delayed."""

from gateway.messages.verifier import CommandBatch, Hint, OpenCommand
from gateway.peers.outbox import Outbox
from gateway.peers.wire import commands_to_proto
from servicekit.message_limits import MessageLimits
from tandem.v1 import limits_pb2, verifier_pb2
from tests.gateway.factories import make_open


def opening(sequence_id: str, num_tokens: int = 3) -> OpenCommand:
    return make_open([1] * num_tokens, sequence_id=sequence_id)


def hint(sequence_id: str, base_length: int = 3) -> Hint:
    return Hint(sequence_id, base_length, [1] * 24, 5)


def batches_of(outbox: Outbox) -> list[CommandBatch]:
    batches = []
    while (batch := outbox.next_batch()) is not None:
        batches.append(batch)
    return batches


def opens_of(outbox: Outbox) -> list[OpenCommand]:
    opens = []
    while (command := outbox.next_open) is not None:
        outbox.remove_open(command)
        opens.append(command)
    return opens


def test_all_waiting_commands_go_in_one_message() -> None:
    outbox = Outbox(hint_tokens=24)
    outbox.open(opening("new"))
    outbox.hint(hint("one"))
    outbox.hint(hint("two"))
    outbox.close("old")
    outbox.update("one", True)
    (batch,) = batches_of(outbox)
    assert [hint.sequence_id for hint in batch.hints] == ["one", "two"]
    assert [command.sequence_id for command in opens_of(outbox)] == ["new"]
    assert list(batch.closes) == ["old"]
    assert list(batch.updates) == [("one", True)]
    assert outbox.is_empty


def test_of_unsent_hints_only_the_latest_is_kept() -> None:
    outbox = Outbox(hint_tokens=24)
    for base_length in (3, 4, 5):
        outbox.hint(hint("one", base_length))
    (batch,) = batches_of(outbox)
    assert [hint.base_length for hint in batch.hints] == [5]


def test_a_sequence_closed_before_its_open_was_sent_leaves_no_command() -> None:
    outbox = Outbox(hint_tokens=24)
    outbox.open(opening("one"))
    outbox.update("one", False)
    outbox.hint(hint("one"))
    outbox.close("one")
    assert outbox.is_empty
    assert outbox.next_batch() is None


def test_a_close_drops_the_sequences_hint() -> None:
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
    assert not batches_of(outbox)
    assert [command.drafting for command in opens_of(outbox)] == [False]


def test_more_hints_than_a_message_may_hold_are_split() -> None:
    outbox = Outbox(hint_tokens=512)
    for index in range(1000):
        outbox.hint(hint(f"{index}"))
    batches = batches_of(outbox)
    assert sum(len(batch.hints) for batch in batches) == 1000
    assert all(len(batch.hints) * 5 * 512 < 1 << 20 for batch in batches)
    assert len(batches) > 1


def test_more_updates_and_closes_than_a_message_may_hold_are_split_and_updates_go_first() -> None:
    outbox = Outbox(hint_tokens=24)
    for index in range(5000):
        outbox.update(f"{index}", True)
        outbox.close(f"old {index}")
    outbox.hint(hint("4999"))
    batches = batches_of(outbox)
    assert sum(len(batch.updates) for batch in batches) == 5000
    assert sum(len(batch.closes) for batch in batches) == 5000
    assert all(len(batch.updates) + len(batch.closes) < 4000 for batch in batches)
    told = {name for batch in batches[:-1] for name, _ in batch.updates}
    assert len(told) < 5000
    assert [len(batch.hints) for batch in batches] == [0] * (len(batches) - 1) + [1]


def test_a_broken_stream_drops_every_command() -> None:
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
    batches = batches_of(outbox)
    for sequence_id in ids:
        outbox.close(sequence_id)
    batches += batches_of(outbox)
    for batch in batches:
        limits.check(commands_to_proto(batch))
    assert [key for batch in batches for key, _ in batch.updates] == ids
    assert [hint.sequence_id for batch in batches for hint in batch.hints] == ids
    assert [key for batch in batches for key in batch.closes] == ids
