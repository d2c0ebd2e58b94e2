"""What is still to be sent to one verifier.

Owns the commands that wait for the stream, merged: of hints the latest per sequence, of updates
the last. Knows no gRPC. However long the stream is blocked, it holds at most a few commands for
each live sequence.
"""

import dataclasses
import itertools

from gateway.messages import CommandBatch, Hint, OpenCommand

# The wire's limit is 1 MiB per message (Open: 4 MiB, and then alone in its message).
_MAX_BATCH_BYTES = 768 * 1024
_COMMAND_BYTES = 128
_TOKEN_BYTES = 5
# Most updates and most closes of a message: with the hints and opens that its bytes leave room for
# they stay under the wire's limit of 16,384 commands.
_MAX_BATCH_IDS = 4096


class Outbox:
    """Commands for one verifier, owned by its link; all on the event loop.

    Invariant: a sequence that is closed before its Open was sent leaves nothing behind.
    """

    def __init__(self, *, hint_tokens: int) -> None:
        """Takes hints of at most `hint_tokens`."""
        self._updates: dict[str, bool] = {}
        self._hints: dict[str, Hint] = {}
        self._opens: dict[str, OpenCommand] = {}
        self._closes: dict[str, None] = {}
        self._max_hints = _MAX_BATCH_BYTES // (_COMMAND_BYTES + _TOKEN_BYTES * hint_tokens)

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
        """Returns whether the verifier has been sent the sequence, and so is to be told."""
        self.forget(sequence_id)
        if self._opens.pop(sequence_id, None) is not None:
            return False
        self._closes[sequence_id] = None
        return True

    def forget(self, sequence_id: str) -> None:
        """The sequence ended at the verifier: what was still to be said of it is pointless."""
        self._hints.pop(sequence_id, None)
        self._updates.pop(sequence_id, None)

    def clear(self) -> None:
        """The stream is gone, and with it everything that was opened on it."""
        for waiting in (self._updates, self._hints, self._opens, self._closes):
            waiting.clear()

    def next_batch(self) -> CommandBatch | None:
        """Takes the next message; None if there is nothing to say.

        Hints are never kept waiting by anything else. Updates come before them: a hint for a
        sequence that is not drafted for would be lost.
        """
        if self.is_empty:
            return None
        updates = list(itertools.islice(self._updates.items(), _MAX_BATCH_IDS))
        for sequence_id, _ in updates:
            del self._updates[sequence_id]
        hints = list(self._hints.values())
        if len(hints) <= self._max_hints:
            self._hints = {}
        else:
            hints = hints[: self._max_hints]
            for hint in hints:
                del self._hints[hint.sequence_id]
        closes = list(itertools.islice(self._closes, _MAX_BATCH_IDS))
        for sequence_id in closes:
            del self._closes[sequence_id]
        says_nothing_yet = not (updates or hints or closes)
        return CommandBatch(
            updates=updates,
            hints=hints,
            opens=self._take_opens(at_least_one=says_nothing_yet),
            closes=closes,
        )

    def _take_opens(self, *, at_least_one: bool) -> list[OpenCommand]:
        opens: list[OpenCommand] = []
        # Hints of a step and all else leave this much at the least.
        room = _MAX_BATCH_BYTES // 4
        for command in self._opens.values():
            room -= _COMMAND_BYTES + _TOKEN_BYTES * len(command.token_ids)
            if room < 0 and (opens or not at_least_one):
                break
            opens.append(command)
        for command in opens:
            del self._opens[command.sequence_id]
        return opens
