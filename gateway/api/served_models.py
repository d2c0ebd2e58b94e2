"""The models that requests may name.

Owns what is told of each, and which one a request gets. Knows no transport.
"""

from collections.abc import Callable, Sequence

from gateway.errors import PreconditionError
from gateway.messages.request import GenerateRequest
from gateway.messages.response import Model
from gateway.metrics import GatewayMetrics
from gateway.requests import acceptance
from gateway.routing.aliases import Aliases, choose_model, key_of
from gateway.routing.fleet import Fleet, no_verifier
from gateway.routing.models import aliases_of
from gateway.text.model_text import ModelText, ModelTexts
from gateway.text.sampling_defaults import NO_DEFAULTS
from tandem.values import SamplingDefaults


class ServedModels:
    """On the event loop."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        aliases: Aliases,
        texts: ModelTexts,
        allow_trace: bool,
        metrics: GatewayMetrics,
    ) -> None:
        """Args:
        aliases: names of several models.
        texts: the tokenizers and chat templates of the models.
        allow_trace: whether requests may ask for a trace of every step.
        """
        self._fleet = fleet
        self._aliases = aliases
        self._texts = texts
        self._allow_trace = allow_trace
        self._metrics = metrics

    def list(self) -> Sequence[Model]:
        """The models, and the aliases, in place of a model of the same name."""
        models = self._fleet.models()
        return list((models | aliases_of(self._aliases, models)).values())

    def choose(
        self,
        model_id: str,
        affinity_key: str,
        beginning: Callable[[], str],
        *,
        expected_digest: str = "",
    ) -> str:
        """The id by which `find` and `of_request` know the model of a request: of an alias, one of
        its models; any other id stays.

        Args:
            affinity_key: the request's; "": it has none.
            beginning: what the prompts of one conversation have in common.
            expected_digest: of the model; "": any.
        """
        weights = self._aliases.get(model_id)
        if weights is None:
            return model_id
        key = key_of(affinity_key, "" if affinity_key else beginning())
        return choose_model(weights, key, self._fleet.models(expected_digest))

    def find(self, model_id: str) -> Model | None:
        """The model of this id; None: it is not served, and requests for it are refused."""
        return self._fleet.models().get(model_id)

    def of_request(self, request: GenerateRequest) -> Model:
        """The model that the request gets.

        Raises:
            InvalidRequestError: there is none of its name.
            PreconditionError: the model of its name is not the one that it expects.
            UnavailableError: no verifier is there, or the model's are missing.
        """
        models = self._fleet.models()
        model_id = request.model_id
        if not models or (model_id not in models and self._fleet.is_missing(model_id)):
            self._metrics.count_shed("no_verifier")
            raise no_verifier()
        if expected := request.expected_model_digest:
            # Also a model that more verifiers of another one outvote: requests that began on it
            # may go on there.
            served, models = models, self._fleet.models(expected)
            if not models or (model_id in served and model_id not in models):
                raise PreconditionError(
                    f"no verifier serves the model {expected}", field="expected_model_digest"
                )
        return acceptance.find_model(model_id, models)

    def text_of(self, model: Model) -> ModelText | None:
        """Its tokenizer and chat template; None: this gateway has none for it."""
        return self._texts.find(model.tokenizer_digest)

    def allows_trace(self, model: Model | None) -> bool:
        """Whether requests for a model may ask for a trace of every step: the gateway and all the
        model's verifiers allow it. None: it is not served.
        """
        return self._allow_trace and model is not None and model.allows_trace

    def sampling_defaults(self, model: Model) -> SamplingDefaults:
        """What requests over HTTP get that name no value."""
        text = self.text_of(model)
        return NO_DEFAULTS if text is None else text.sampling_defaults

    def speculation_note(self, model: Model) -> str:
        """What drafts brought the last requests, and if little, why; "" if that is not known."""
        if model.alias_of:
            return ""
        return self._metrics.of_model(model.model_id).speculation_note
