"""The verifiers and drafters that this gateway is connected to, or tries to be.

Owns the lists of links, what they add up to (models, health) and, with the router's rules, which
of them a request goes to. Knows no sequence.
"""

from collections.abc import Sequence

from gateway.errors import RETRY_AFTER_MS, UnavailableError
from gateway.messages.request import AcceptedRequest
from gateway.messages.response import Model
from gateway.messages.verifier import Welcome
from gateway.peers.drafter_link import DrafterLink
from gateway.peers.verifier_link import VerifierLink
from gateway.routing import router
from servicekit.errors import RequestError


class Fleet:
    """All peers. Filled once, before the links run."""

    def __init__(self) -> None:
        self.verifiers: list[VerifierLink] = []
        self.drafters: list[DrafterLink] = []

    @property
    def is_serving(self) -> bool:
        """Whether any verifier is connected."""
        return any(verifier.welcome is not None for verifier in self.verifiers)

    def awaits_drafts(self) -> bool:
        """Whether a hint is on its way from any drafter."""
        return any(drafter.awaits_drafts for drafter in self.drafters)

    def models(self) -> dict[str, Model]:
        """The models of the connected verifiers, by id.

        What two verifiers serve by one name is one model only if it has one digest: of several,
        the one that more verifiers serve is meant, or that of the first of them. The others wait,
        connected, until they are more: while a fleet moves to new weights no request is answered
        by old ones and new.

        A model's limits are the narrowest among its verifiers, so that what fits the model fits
        each of them: a request may go to any, and later on to another.
        """
        welcomes_of: dict[tuple[str, str], list[Welcome]] = {}
        for verifier in self.verifiers:
            welcome = verifier.welcome
            if welcome is not None:
                welcomes_of.setdefault((welcome.model_id, welcome.model_digest), []).append(welcome)
        models: dict[str, Model] = {}
        for (model_id, _), welcomes in welcomes_of.items():
            known = models.get(model_id)
            if known is None or len(welcomes) > known.num_verifiers:
                models[model_id] = _model_of(welcomes)
        return models

    def is_outvoted(self, verifier: VerifierLink) -> bool:
        """Whether a connected verifier gets no requests: another model goes by its model's name."""
        welcome = verifier.welcome
        return (
            welcome is not None
            and self.models()[welcome.model_id].model_digest != welcome.model_digest
        )

    def find_verifier(self, request: AcceptedRequest) -> VerifierLink:
        """The verifier for all choices of a request: one of the model that it was checked against.

        Raises:
            UnavailableError: none that serves the model is connected.
        """
        candidates = {
            verifier.name: verifier
            for verifier in self.verifiers
            if verifier.welcome is not None
            and verifier.welcome.model_id == request.model_id
            and verifier.welcome.model_digest == request.model_digest
        }
        if not candidates:
            raise no_verifier()
        name = router.choose_verifier(
            router.affinity_of(request.affinity_key, request.prompt_token_ids),
            [
                router.Candidate(name=name, load=verifier.num_sequences)
                for name, verifier in candidates.items()
            ],
            request.num_choices,
        )
        return candidates[name]

    def find_drafter(self, sequence_id: str) -> DrafterLink | None:
        """The drafter of a new sequence; None if there are none at all.

        One that answers, if any does. Later it is not changed: while it is down it keeps its
        sequences, and it is replayed their histories when it is back.
        """
        by_name = {drafter.name: drafter for drafter in self.drafters}
        able = [name for name, drafter in by_name.items() if drafter.is_up and not drafter.is_slow]
        name = router.choose_drafter(sequence_id, able or by_name)
        return None if name is None else by_name[name]

    def busy_parts(self) -> Sequence[str]:
        """The links that still have something in them; for integrity checks."""
        links: Sequence[VerifierLink | DrafterLink] = [*self.verifiers, *self.drafters]
        return [link.name for link in links if not link.is_idle]


def no_verifier() -> RequestError:
    """The error of a request that no verifier can run now."""
    return UnavailableError("no verifier can be reached", retry_after_ms=RETRY_AFTER_MS)


def _model_of(welcomes: Sequence[Welcome]) -> Model:
    limits = [welcome.limits for welcome in welcomes]
    return Model(
        model_id=welcomes[0].model_id,
        model_digest=welcomes[0].model_digest,
        vocab_size=min(each.vocab_size for each in limits),
        max_model_len=min(each.max_model_len for each in limits),
        max_num_speculative_tokens=min(each.max_num_speculative_tokens for each in limits),
        num_verifiers=len(welcomes),
        tokenizer_digest=max(welcome.tokenizer_digest for welcome in welcomes),
    )
