"""The verifiers that this gateway is connected to, or tries to be, and their drafters.

Owns the list of links, whether they can serve, and, by the router's rules, which verifier a request
goes to. Knows no sequence.
"""

import time
from collections.abc import Collection

from gateway.errors import RETRY_AFTER_MS, UnavailableError
from gateway.messages.request import AcceptedRequest
from gateway.messages.response import Model
from gateway.metrics import GatewayMetrics
from gateway.peers.verifier_link import VerifierLink
from gateway.routing import router
from gateway.routing.drafters import Drafters
from gateway.routing.models import models_of
from servicekit.errors import RequestError
from servicekit.logs import Logger

# For so long a model without verifiers is taken to come back: after that it was removed or renamed.
_MISSING_S = 600.0
_MAX_MISSING = 1024


class Fleet:
    """All peers. `routing/membership.py` keeps `verifiers`."""

    def __init__(self, *, metrics: GatewayMetrics, logger: Logger) -> None:
        """Begins without peers."""
        self._metrics = metrics
        self._logger = logger
        self.verifiers: list[VerifierLink] = []
        self.drafters = Drafters()
        # Verifiers without requests, because others serve another model by the same name.
        self._outvoted: list[VerifierLink] = []
        # Ids of the models that are served, and since when those are missing that were.
        self._served: frozenset[str] = frozenset()
        self._missing_since_s: dict[str, float] = {}
        metrics.watch_kv_cache(self._kv_usage)

    @property
    def is_serving(self) -> bool:
        """Whether any verifier is connected that requests can go to."""
        return any(verifier.is_available for verifier in self.verifiers)

    def models(self, model_digest: str = "") -> dict[str, Model]:
        """The models of the verifiers that requests can go to, by id.

        Args:
            model_digest: only those with this digest, also where another one has more verifiers;
                "": any.
        """
        return models_of(
            each.welcome
            for each in self.verifiers
            if each.welcome is not None
            and each.is_available
            and model_digest in ("", each.welcome.model_digest)
        )

    def drafters_of(self, model_id: str) -> set[str]:
        """The addresses of the drafters that draft for this model's verifiers."""
        chosen = {
            self.drafters.choose(each.name)
            for each in self.verifiers
            if each.welcome is not None and each.welcome.model_id == model_id
        }
        return chosen - {""}

    @property
    def has_several_models(self) -> bool:
        """Whether several models are served, or have been lately: their verifiers may come back."""
        # The last one that went first: while it is missing, the others need no look.
        missing = reversed(self._missing_since_s)
        return len(self._served) > 1 or any(self.is_missing(each) for each in missing)

    def is_missing(self, model_id: str) -> bool:
        """Whether the model has lost its last verifier, a short time ago, and not got another."""
        since_s = self._missing_since_s.get(model_id)
        return since_s is not None and time.monotonic() < since_s + _MISSING_S

    def report_connected(self) -> None:
        """Exports how many peers are connected, after a change."""
        self._metrics.set_connected(
            num_verifiers=sum(verifier.welcome is not None for verifier in self.verifiers),
            num_drafters=self.drafters.num_up,
        )

    def _kv_usage(self) -> float:
        """Of all K/V blocks of the verifiers, the share in use, 0 to 1. What a verifier without
        sequences of this gateway uses is not known, and counts as none.
        """
        num_used = num_blocks = 0
        for verifier in list(self.verifiers):
            if (welcome := verifier.welcome) is not None:
                num_blocks += welcome.num_kv_blocks
                num_used += verifier.load.num_kv_blocks_used if verifier.num_sequences else 0
        return num_used / num_blocks if num_blocks else 0.0

    def check_models(self) -> None:
        """Notes the models that are missing, and reports the verifiers whose model is outvoted,
        after one came or went.
        """
        models = self.models()
        for model_id in self._served.difference(models):
            self._missing_since_s[model_id] = time.monotonic()
        for model_id in models:
            self._missing_since_s.pop(model_id, None)
        if len(self._missing_since_s) > _MAX_MISSING:
            del self._missing_since_s[next(iter(self._missing_since_s))]
        self._served = frozenset(models)
        outvoted = []
        for verifier in self.verifiers:
            welcome = verifier.welcome
            if welcome is None or not verifier.is_available:
                continue
            if models[welcome.model_id].model_digest == welcome.model_digest:
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

    def find_verifier(
        self,
        request: AcceptedRequest,
        *,
        num_choices: int,
        refused_by: Collection[str] = (),
        numerics_digest: str = "",
        instead_of: VerifierLink | None = None,
    ) -> VerifierLink:
        """The verifier for choices of a request, which serves the model that it was checked
        against, and has room for the longest output that it was accepted with: one with a smaller
        limit may have come since then, and would end the output at its own.

        Verifiers that do not respond or have no room get requests only if all are like that.

        Args:
            num_choices: that begin or go on there.
            refused_by: names of verifiers that are out of question.
            numerics_digest: of the verifier that made the output so far: another one with the same
                continues it with the same tokens, and is preferred.
            instead_of: where the one choice is open now, which counts as no load there.

        Raises:
            UnavailableError: no such verifier is connected.
        """
        candidates = [
            verifier
            for verifier in self.verifiers
            if verifier.is_available
            and verifier.welcome is not None
            and verifier.welcome.model_id == request.model_id
            and verifier.welcome.model_digest == request.model_digest
            and verifier.welcome.max_model_len >= request.max_length
            and verifier.name not in refused_by
        ]
        if not candidates:
            raise no_verifier()
        candidates = [v for v in candidates if not v.load.is_unresponsive] or candidates
        now_s = time.monotonic()
        candidates = [v for v in candidates if v.load.full_until_s <= now_s] or candidates
        if numerics_digest:
            same = [v for v in candidates if v.numerics_digest == numerics_digest]
            candidates = same or candidates
        by_name = {verifier.name: verifier for verifier in candidates}
        name = router.choose_verifier(
            router.affinity_of(request.affinity_key, request.prompt_token_ids),
            {
                each.name: each.num_sequences + each.load.num_others - (each is instead_of)
                for each in candidates
            },
            num_choices,
        )
        return by_name[name]

    def has_alternative(self, verifier: VerifierLink) -> bool:
        """Whether another verifier responds that serves the same model."""
        model = verifier.welcome
        return model is not None and any(
            other is not verifier
            and other.is_available
            and not other.load.is_unresponsive
            and other.welcome is not None
            and other.welcome.model_digest == model.model_digest
            and other.welcome.model_id == model.model_id
            for other in self.verifiers
        )

    def check_idle(self) -> None:
        """Checks that no link holds anything.

        Raises:
            AssertionError: one does; it names it.
        """
        busy = [verifier.name for verifier in self.verifiers if not verifier.is_idle]
        assert not busy, f"links that are not idle: {busy}"
        expecting = [verifier.name for verifier in self.verifiers if verifier.load.prompts]
        assert not expecting, f"links that expect prompts to be computed: {expecting}"


def no_verifier() -> RequestError:
    """The error of a request that no verifier can run now."""
    return UnavailableError("no verifier can be reached", retry_after_ms=RETRY_AFTER_MS)
