"""Commands for a verifier are merged and bounded."""

from gateway.messages.sizes import MAX_DRAFTER_ADDRESS_BYTES
from gateway.messages.verifier import CloseCommand, CommandBatch, OpenCommand
from gateway.peers.outbox import Outbox
from gateway.peers.wire import commands_to_proto
from servicekit.message_limits import MessageLimits
from tandem.v1 import limits_pb2, verifier_pb2
from tandem.values import Keep
from tests.gateway.factories import make_open


def opening(sequence_id: str) -> OpenCommand:
    return make_open(sequence_id=sequence_id)


def closing(sequence_id: str, keep: Keep = Keep.NOTHING) -> CloseCommand:
    return CloseCommand(sequence_id, keep, 7)


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


def test_of_unsent_updates_only_the_latest_is_kept() -> None:
    outbox = Outbox()
    for address in ("a:1", "b:1", "c:1"):
        outbox.update("one", address)
    (batch,) = batches_of(outbox)
    assert list(batch.updates) == [("one", "c:1")]


def test_a_sequence_closed_before_its_open_was_sent_leaves_no_command() -> None:
    outbox = Outbox()
    outbox.open(opening("one"))
    outbox.update("one", "a:1")
    assert not outbox.close(closing("one"))
    assert outbox.is_empty
    assert outbox.next_batch() is None


def test_a_message_holds_fewer_commands_than_a_verifier_takes_at_most() -> None:
    limits = MessageLimits(verifier_pb2.SessionRequest.DESCRIPTOR, limits_pb2)
    outbox = Outbox()
    ids = [f"{i:032x}" for i in range(20_000)]
    for sequence_id in ids:
        outbox.update(sequence_id, "a" * MAX_DRAFTER_ADDRESS_BYTES)
        outbox.close(closing(f"old {sequence_id}", Keep.ALL))
    batches = batches_of(outbox)
    assert len(batches) > 1
    for batch in batches:
        message = commands_to_proto(batch)
        limits.check(message)
        assert message.ByteSize() < 3 << 18, "room is left for opens"
    assert [key for batch in batches for key, _ in batch.updates] == ids
    assert [each.sequence_id for batch in batches for each in batch.closes] == [
        f"old {each}" for each in ids
    ]


def test_an_update_before_its_open_was_sent_changes_the_open() -> None:
    outbox = Outbox()
    outbox.open(opening("one"))
    assert outbox.update("one", "b:1")
    [opened] = opens_of(outbox)
    assert opened.drafter == "b:1"
    assert not outbox.update("one", "c:1")
    assert [list(batch.updates) for batch in batches_of(outbox)] == [[("one", "c:1")]]
