"""The verifiers and drafters that this gateway is connected to, or tries to be.

Owns the lists of links, whether they can serve, and, by the router's rules, which of them a
request goes to. Knows no sequence.
"""

from collections.abc import Sequence

from gateway.errors import RETRY_AFTER_MS, UnavailableError
from gateway.messages.request import AcceptedRequest
from gateway.messages.response import Model
from gateway.metrics import GatewayMetrics
from gateway.peers.drafter_link import DrafterLink
from gateway.peers.verifier_link import VerifierLink
from gateway.routing import router
from gateway.routing.models import models_of
from servicekit.errors import RequestError
from servicekit.logs import Logger


class Fleet:
    """All peers. Filled once, before the links run."""

    def __init__(self, *, metrics: GatewayMetrics, logger: Logger) -> None:
        self._metrics = metrics
        self._logger = logger
        self.verifiers: list[VerifierLink] = []
        self.drafters: list[DrafterLink] = []
        # Verifiers without requests, because others serve another model by the same name.
        self._outvoted: list[VerifierLink] = []

    @property
    def links(self) -> Sequence[VerifierLink | DrafterLink]:
        return [*self.verifiers, *self.drafters]

    @property
    def is_serving(self) -> bool:
        """Whether any verifier is connected."""
        return any(verifier.welcome is not None for verifier in self.verifiers)

    def awaits_drafts(self) -> bool:
        """Whether a hint is expected from any drafter."""
        return any(drafter.awaits_drafts for drafter in self.drafters)

    def models(self) -> dict[str, Model]:
        """The models of the connected verifiers, by id."""
        return models_of(each.welcome for each in self.verifiers if each.welcome is not None)

    def check_models(self) -> None:
        """Reports the verifiers whose model is outvoted, after one came or went."""
        models = self.models()
        outvoted = []
        for verifier in self.verifiers:
            welcome = verifier.welcome
            if welcome is None or models[welcome.model_id].model_digest == welcome.model_digest:
                continue
            outvoted.append(verifier)
            # One that comes may also outvote others.
            if verifier not in self._outvoted:
                self._logger.warning(
                    "model_digests_differ",
                    verifier=verifier.name,
                    model_id=welcome.model_id,
                    model_digest=welcome.model_digest,
                )
        self._outvoted = outvoted
        self._metrics.set_verifiers_outvoted(len(outvoted))

    def find_verifier(self, request: AcceptedRequest) -> VerifierLink:
        """The verifier for all choices of a request, which serves the model that it was checked
        against.

        Raises:
            UnavailableError: no such verifier is connected.
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
            {name: verifier.num_sequences for name, verifier in candidates.items()},
            request.num_choices,
        )
        return candidates[name]

    def find_drafter(self, sequence_id: str) -> DrafterLink | None:
        """The drafter of a new sequence; None if there is no drafter.

        One that answers in time, if any does. It is never changed: one that is down keeps its
        sequences, and gets their histories again when it is back.
        """
        by_name = {drafter.name: drafter for drafter in self.drafters}
        able = [name for name, drafter in by_name.items() if drafter.is_up and not drafter.is_slow]
        name = router.choose_drafter(sequence_id, able or by_name)
        return None if name is None else by_name[name]

    def check_idle(self) -> None:
        """Checks that no link holds anything.

        Raises:
            AssertionError: one does; it names it.
        """
        busy = [link.name for link in self.links if not link.is_idle]
        assert not busy, f"links that are not idle: {busy}"


def no_verifier() -> RequestError:
    """The error of a request that no verifier can run now."""
    return UnavailableError("no verifier can be reached", retry_after_ms=RETRY_AFTER_MS)
