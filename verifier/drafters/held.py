"""Ended sequences whose Close says what their pools keep.

Owns how many are held, and which one gives way to another: the oldest of the session that has most,
so that no session loses one to a session that has more. Knows no time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from verifier.drafters.feed import DraftFeed
from verifier.scheduling.sequence import Sequence

# Sequences, and their tokens, some 40 bytes each: beyond that, some are given up.
_MAX_HELD = 4_096
_MAX_HELD_TOKENS = 2 << 20


class Held(NamedTuple):
    """An ended sequence, its drafter's feed, and until when its Close is awaited."""

    feed: DraftFeed
    sequence: Sequence
    until_s: float


@dataclass(slots=True)
class _Share:
    """What one session has, oldest first, by sequence id."""

    held: dict[str, Held] = field(default_factory=dict)
    num_tokens: int = 0


class HeldSequences:
    """The held sequences of all sessions; owned by the engine thread."""

    def __init__(self) -> None:
        self._by_session: dict[int, _Share] = {}
        self._num_held = 0
        self._num_tokens = 0

    def __iter__(self) -> Iterator[Held]:
        for share in self._by_session.values():
            yield from share.held.values()

    def of_session(self, session_id: int) -> list[Held]:
        share = self._by_session.get(session_id)
        return [] if share is None else list(share.held.values())

    def add(self, held: Held) -> None:
        """Holds one; no other with its id may be held, and `excess` says that there is room."""
        sequence = held.sequence
        share = self._by_session.setdefault(sequence.session_id, _Share())
        assert sequence.sequence_id not in share.held, "its Close cannot come any more"
        share.held[sequence.sequence_id] = held
        share.num_tokens += len(sequence.token_ids)
        self._num_held += 1
        self._num_tokens += len(sequence.token_ids)

    def excess(self, session_id: int) -> Held | None:
        """The one that must go before one more of this session is held; None: there is room."""
        if self._num_held >= _MAX_HELD:
            sizes = {key: len(share.held) for key, share in self._by_session.items()}
        elif self._num_tokens >= _MAX_HELD_TOKENS:
            sizes = {key: share.num_tokens for key, share in self._by_session.items()}
        else:
            return None
        # If several sessions have most, the one that wants to hold another gives way.
        largest = max(sizes, key=lambda key: (sizes[key], key == session_id))
        return next(iter(self._by_session[largest].held.values()))

    def pop(self, session_id: int, sequence_id: str) -> Held | None:
        """Removes one; None if there is no such."""
        share = self._by_session.get(session_id)
        held = None if share is None else share.held.pop(sequence_id, None)
        if share is None or held is None:
            return None
        num_tokens = len(held.sequence.token_ids)
        share.num_tokens -= num_tokens
        self._num_held -= 1
        self._num_tokens -= num_tokens
        if not share.held:
            del self._by_session[session_id]
        return held

    def check_integrity(self) -> None:
        """Asserts that the totals are right."""
        assert self._num_held == sum(1 for _ in self)
        assert self._num_tokens == sum(len(held.sequence.token_ids) for held in self)
        for session_id, share in self._by_session.items():
            assert share.held, f"session {session_id} has none"
            assert share.num_tokens == sum(
                len(held.sequence.token_ids) for held in share.held.values()
            )
