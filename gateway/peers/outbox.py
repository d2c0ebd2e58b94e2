"""The commands that are still to be sent to one verifier.

Owns them, merged: the latest update of each sequence. Knows no gRPC. However long the stream is
blocked, it holds at most a few commands for each live sequence.
"""

import dataclasses
import itertools
from collections import OrderedDict

from gateway.messages.sizes import MAX_DRAFTER_ADDRESS_BYTES, MAX_SESSION_REQUEST_BYTES
from gateway.messages.verifier import CloseCommand, CommandBatch, OpenCommand

# A command's id, its numbers and the address of a drafter.
_COMMAND_BYTES = 80 + MAX_DRAFTER_ADDRESS_BYTES
# Of each message: for updates and closes each. More wait for the next message.
_MAX_NOTICES = MAX_SESSION_REQUEST_BYTES // 4 // _COMMAND_BYTES


class Outbox:
    """Commands for one verifier, owned by its link; all on the event loop.

    Invariant: a sequence that is closed before its Open was sent leaves nothing behind.
    """

    def __init__(self) -> None:
        self._updates: dict[str, str] = {}
        # Thousands may wait when a verifier is lost: a plain dict is slow to give its oldest entry.
        self._opens: OrderedDict[str, OpenCommand] = OrderedDict()
        self._closes: dict[str, CloseCommand] = {}

    @property
    def is_empty(self) -> bool:
        return not (self._updates or self._opens or self._closes)

    def open(self, command: OpenCommand) -> None:
        self._opens[command.sequence_id] = command

    def update(self, sequence_id: str, drafter: str) -> bool:
        """Returns whether the Open was not sent yet, and names this drafter now."""
        unsent = self._opens.get(sequence_id)
        if unsent is not None:
            self._opens[sequence_id] = dataclasses.replace(unsent, drafter=drafter)
            return True
        self._updates[sequence_id] = drafter
        return False

    def close(self, command: CloseCommand) -> bool:
        """Returns whether the verifier was sent the sequence, so that it gets a Close."""
        self.forget(command.sequence_id)
        if self._opens.pop(command.sequence_id, None) is not None:
            return False
        self._closes[command.sequence_id] = command
        return True

    def forget(self, sequence_id: str) -> None:
        """The sequence is over: drops its update."""
        self._updates.pop(sequence_id, None)

    def clear(self) -> None:
        """The stream is gone, and with it every sequence that was opened on it."""
        for waiting in (self._updates, self._opens, self._closes):
            waiting.clear()

    def next_batch(self) -> CommandBatch | None:
        """Removes the next message, without its Opens; None if there is nothing else."""
        if not (self._updates or self._closes):
            return None
        updates = list(itertools.islice(self._updates.items(), _MAX_NOTICES))
        for sequence_id, _ in updates:
            del self._updates[sequence_id]
        closes = list(itertools.islice(self._closes.values(), _MAX_NOTICES))
        for command in closes:
            del self._closes[command.sequence_id]
        return CommandBatch(updates=updates, closes=closes)

    @property
    def next_open(self) -> OpenCommand | None:
        """The Open that is sent next; it stays until `remove_open`, and may change until then."""
        return next(iter(self._opens.values()), None)

    def remove_open(self, command: OpenCommand) -> None:
        """The Open is sent now, or never."""
        del self._opens[command.sequence_id]
