"""The commands that are still to be sent to one verifier.

Owns them, merged: the latest hint and the latest update of each sequence. Knows no gRPC. However
long the stream is blocked, it holds at most a few commands for each live sequence.
"""

import dataclasses
import itertools

from gateway.messages.sizes import MAX_SESSION_REQUEST_BYTES, TOKEN_BYTES
from gateway.messages.verifier import CommandBatch, Hint, OpenCommand

# A command without its tokens: a sequence id, and some numbers.
_COMMAND_BYTES = 80
# Of each message: for hints, and for updates and closes each. More wait for the next message.
_MAX_HINT_BYTES = MAX_SESSION_REQUEST_BYTES // 2
_MAX_NOTICES = MAX_SESSION_REQUEST_BYTES // 8 // _COMMAND_BYTES


class Outbox:
    """Commands for one verifier, owned by its link; all on the event loop.

    Invariant: a sequence that is closed before its Open was sent leaves nothing behind.
    """

    def __init__(self, *, hint_tokens: int) -> None:
        """Holds hints of at most `hint_tokens`."""
        self._updates: dict[str, bool] = {}
        self._hints: dict[str, Hint] = {}
        self._opens: dict[str, OpenCommand] = {}
        self._closes: dict[str, None] = {}
        self._max_hints = _MAX_HINT_BYTES // (_COMMAND_BYTES + TOKEN_BYTES * hint_tokens)

    @property
    def is_empty(self) -> bool:
        return not (self._hints or self._updates or self._opens or self._closes)

    def open(self, command: OpenCommand) -> None:
        self._opens[command.sequence_id] = command

    def hint(self, hint: Hint) -> None:
        """Hot path."""
        self._hints[hint.sequence_id] = hint

    def update(self, sequence_id: str, drafting: bool) -> None:
        unsent = self._opens.get(sequence_id)
        if unsent is not None:
            self._opens[sequence_id] = dataclasses.replace(unsent, drafting=drafting)
        else:
            self._updates[sequence_id] = drafting

    def close(self, sequence_id: str) -> bool:
        """Returns whether the verifier was sent the sequence, so that it gets a Close."""
        self.forget(sequence_id)
        if self._opens.pop(sequence_id, None) is not None:
            return False
        self._closes[sequence_id] = None
        return True

    def forget(self, sequence_id: str) -> None:
        """The sequence ended at the verifier: drops its hint and its update."""
        self._hints.pop(sequence_id, None)
        self._updates.pop(sequence_id, None)

    def clear(self) -> None:
        """The stream is gone, and with it every sequence that was opened on it."""
        for waiting in (self._updates, self._hints, self._opens, self._closes):
            waiting.clear()

    def next_batch(self) -> CommandBatch | None:
        """Removes the next message, without its Opens; None if there is nothing else.

        No other command delays hints. Updates come before them: a hint for a sequence that expects
        none would be lost.
        """
        if not (self._hints or self._updates or self._closes):
            return None
        updates = list(itertools.islice(self._updates.items(), _MAX_NOTICES))
        for sequence_id, _ in updates:
            del self._updates[sequence_id]
        hints = [] if self._updates else list(self._hints.values())
        if len(hints) == len(self._hints) <= self._max_hints:
            self._hints = {}
        else:
            hints = hints[: self._max_hints]
            for hint in hints:
                del self._hints[hint.sequence_id]
        closes = list(itertools.islice(self._closes, _MAX_NOTICES))
        for sequence_id in closes:
            del self._closes[sequence_id]
        return CommandBatch(updates=updates, hints=hints, closes=closes)

    @property
    def next_open(self) -> OpenCommand | None:
        """The Open that is sent next; it stays until `remove_open`, and may change until then."""
        return next(iter(self._opens.values()), None)

    def remove_open(self, command: OpenCommand) -> None:
        """The Open is sent now, or never."""
        del self._opens[command.sequence_id]
