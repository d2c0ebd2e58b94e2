"""Opens sequences at their verifiers, each with the drafter that the verifier is to ask."""

import secrets

from gateway.generation.generation import Generation
from gateway.messages.verifier import DrafterState, OpenCommand
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.drafters import Drafters
from gateway.routing.live_sequences import LiveSequence, LiveSequences
from gateway.routing.resumption import Displaced
from tandem.values import DraftWait


class Opening:
    """On the event loop."""

    def __init__(
        self, *, drafters: Drafters, sequences: LiveSequences, draft_wait: DraftWait
    ) -> None:
        """Args:
        draft_wait: how long verifiers may wait for drafts.
        """
        self._drafters = drafters
        self._sequences = sequences
        self._draft_wait = draft_wait

    def start(
        self,
        generation: Generation,
        verifier: VerifierLink,
        refused_by: frozenset[str] = frozenset(),
        displaced: Displaced | None = None,
        *,
        was_queued: bool = False,
    ) -> None:
        """Opens a choice at a verifier."""
        sequence = LiveSequence(
            generation=generation,
            verifier=verifier,
            numerics_digest=verifier.numerics_digest,
            opened_length=len(generation.token_ids),
            refused_by=refused_by,
            displaced=displaced,
            was_queued=was_queued,
        )
        self._sequences.add(sequence)
        self._send_open(sequence)

    def with_other_drafter(self, sequence: LiveSequence, reason: str) -> None:
        """The verifier may not talk to the sequence's drafter: opens it with another, or none."""
        verifier = sequence.verifier
        # It may have been moved meanwhile, to a drafter that nobody refused.
        refused = sequence.opened_drafter
        # Others may have been opened before it was known.
        if self._drafters.set_state(verifier.name, refused, DrafterState.REFUSED):
            verifier.ignored.record("refused_drafter", reason)
        sequence.drafter = ""
        self._send_open(sequence)

    def _send_open(self, sequence: LiveSequence) -> None:
        generation = sequence.generation
        verifier = sequence.verifier
        assert verifier.welcome is not None, "it was chosen, so it is connected"
        if generation.request.wants_drafts:
            sequence.drafter = self._drafters.choose(verifier.name)
            sequence.opened_drafter = sequence.drafter
        verifier.open(
            OpenCommand(
                sequence_id=sequence.sequence_id,
                token_ids=generation.token_ids,
                request=generation.request,
                sampling=generation.sampling,
                seed=generation.seed,
                num_speculative_tokens=min(
                    generation.request.num_speculative_tokens,
                    verifier.welcome.max_num_speculative_tokens,
                ),
                draft_wait=self._draft_wait,
                drafter=sequence.drafter,
            )
        )


def new_sequence_id() -> str:
    """128 random bits: never used again, and nobody can guess them."""
    return secrets.token_hex(16)
