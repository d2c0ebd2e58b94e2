"""Moves a choice that waits at a verifier to one where none waits, as after a failure: the verifier
that came back has nothing to do, and all wait at those that took its sequences over.

Owns which one moves, and when: one at a time, after any verifier's step, if the router would now
send it elsewhere. So prefix caches count as for a new request, a choice that moved stays until
loads have changed, and at a verifier that is lost again few have moved. Does not move it: the
coordinator does.
"""

import itertools
import math
import time
from collections.abc import Callable

from gateway.errors import UnavailableError
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.fleet import Fleet
from gateway.routing.live_sequences import LiveSequence, LiveSequences

# Choices looked at to find one that may move, and after how long the next are if there was none:
# with ten verifiers the router takes 0.1 ms for each, and every step of every verifier asks.
_CHOICES_PER_SEARCH = 8
_SEARCH_INTERVAL_S = 0.1


class WaitingMoves:
    """The moves between all verifiers; on the event loop."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        sequences: LiveSequences,
        max_losses: int,
        move: Callable[[LiveSequence, VerifierLink], None],
    ) -> None:
        """Args:
        max_losses: a choice that lost more verifiers stays where it is.
        move: opens a waiting sequence's choice at this verifier instead.
        """
        self._fleet = fleet
        self._sequences = sequences
        self._max_losses = max_losses
        self._move = move
        self._next_search_s = -math.inf

    def after_step(self) -> None:
        """A verifier came or made a step: moves a choice, if one should move.

        The last one that waits moves. So none waits longer than without the move.
        """
        now_s = time.monotonic()
        if not self._sequences.num_waiting or now_s < self._next_search_s:
            return
        free = [each for each in self._fleet.verifiers if self._has_room(each)]
        if not free:
            return
        models = {each.welcome.model_digest for each in free if each.welcome is not None}
        # What a verifier has not yet reported as waiting may be about to run.
        busy = [
            each
            for each in self._fleet.verifiers
            if each.load.num_waiting
            and each.welcome is not None
            and each.welcome.model_digest in models
        ]
        busy.sort(key=lambda each: each.load.num_waiting, reverse=True)
        waiting = itertools.chain.from_iterable(map(self._sequences.last_waiting, busy))
        for sequence in itertools.islice(waiting, _CHOICES_PER_SEARCH):
            verifier = self._find_better(sequence)
            if verifier in free:
                self._move(sequence, verifier)
                return
        self._next_search_s = now_s + _SEARCH_INTERVAL_S

    def _has_room(self, verifier: VerifierLink) -> bool:
        return (
            verifier.is_available
            and not verifier.load.num_waiting
            and not self._sequences.has_waiting(verifier)
        )

    def _find_better(self, sequence: LiveSequence) -> VerifierLink | None:
        """Where the router would send a choice now; None if it must stay."""
        generation = sequence.generation
        if (
            generation.num_losses > self._max_losses
            or len(generation.token_ids) > sequence.opened_length
            or self._sequences.is_computing_prompt(generation.request, sequence.verifier)
        ):
            return None
        try:
            return self._fleet.find_verifier(
                generation.request,
                num_choices=1,
                refused_by=(sequence.displaced or sequence).refused_by,
                numerics_digest=generation.numerics_digest,
                instead_of=sequence.verifier,
            )
        except UnavailableError:
            return None
