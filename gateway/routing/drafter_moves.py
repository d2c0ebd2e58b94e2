"""Moves a sequence to another drafter when its own no longer drafts for its verifier, and to its
first one when it has none.

Owns when a sequence moves: once per change that its verifier reports, or of the drafters that there
are, if its own drafter is gone or unable to draft and another one is able, or if it has none. So a
sequence never moves back because its former drafter is able again. There may be thousands of
sequences: few are looked at per iteration of the event loop.
"""

import asyncio
from collections.abc import Iterator

from gateway.peers.verifier_link import VerifierLink
from gateway.routing.drafters import Drafters
from gateway.routing.live_sequences import LiveSequence, LiveSequences

#: Sequences looked at before the event loop polls its sockets again.
SEQUENCES_PER_ITERATION = 64


class DrafterMoves:
    """The moves of all verifiers' sequences; on the event loop."""

    def __init__(self, *, drafters: Drafters, sequences: LiveSequences) -> None:
        """Begins with nothing to do."""
        self._drafters = drafters
        self._sequences = sequences
        self._loop = asyncio.get_running_loop()
        # However many changes a verifier reports, it waits once.
        self._changed: dict[VerifierLink, None] = {}
        self._unchecked: Iterator[LiveSequence] = iter(())
        self._next_run: asyncio.Handle | None = None

    @property
    def is_idle(self) -> bool:
        return self._next_run is None

    def start(self, verifier: VerifierLink) -> None:
        """Other drafters are able to draft for this verifier."""
        self._changed[verifier] = None
        if self._next_run is None:
            self._next_run = self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._next_run = None
        for _ in range(SEQUENCES_PER_ITERATION):
            sequence = next(self._unchecked, None)
            if sequence is not None:
                self._check(sequence)
            elif self._changed:
                verifier = next(iter(self._changed))
                del self._changed[verifier]
                self._unchecked = iter(self._sequences.of_verifier(verifier))
            else:
                return
        self._next_run = self._loop.call_soon(self._run)

    def _check(self, sequence: LiveSequence) -> None:
        if self._sequences.find(sequence.sequence_id) is not sequence:
            return
        if not sequence.generation.request.wants_drafts:
            return
        verifier = sequence.verifier
        # Without a drafter, its own is none of those that are able.
        address = self._drafters.choose_instead(verifier.name, sequence.drafter)
        if address:
            sequence.drafter = address
            if verifier.update(sequence.sequence_id, drafter=address):
                sequence.opened_drafter = address
