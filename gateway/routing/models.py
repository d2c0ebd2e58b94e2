"""The models that connected verifiers serve.

Owns which verifiers serve one model together. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence

from gateway.messages.response import Model
from gateway.messages.verifier import Welcome
from gateway.routing.aliases import Aliases


def models_of(welcomes: Iterable[Welcome]) -> dict[str, Model]:
    """The models of connected verifiers, by id.

    Verifiers serve one model if they agree in id and digest. Where one id has several digests, the
    one with the most verifiers wins, or the first of these. The others stay connected and get no
    requests: while a fleet moves to new weights, no request is answered by old ones and new.

    A model's limits are the narrowest among its verifiers, so that a request that fits the model
    fits each of them.
    """
    welcomes_of: dict[tuple[str, str], list[Welcome]] = {}
    for welcome in welcomes:
        welcomes_of.setdefault((welcome.model_id, welcome.model_digest), []).append(welcome)
    models: dict[str, Model] = {}
    for (model_id, _), group in welcomes_of.items():
        known = models.get(model_id)
        if known is None or len(group) > known.num_verifiers:
            models[model_id] = _model_of(group)
    return models


def aliases_of(aliases: Aliases, models: Mapping[str, Model]) -> dict[str, Model]:
    """The aliases with a model that is served, each with the narrowest limits among its models."""
    found = {}
    for name, weights in aliases.items():
        served = [models[model_id] for model_id in weights if model_id in models]
        if served:
            tokenizers = {model.tokenizer_digest for model in served}
            found[name] = Model(
                model_id=name,
                model_digest="",
                vocab_size=min(each.vocab_size for each in served),
                max_model_len=min(each.max_model_len for each in served),
                max_num_speculative_tokens=min(each.max_num_speculative_tokens for each in served),
                num_verifiers=sum(each.num_verifiers for each in served),
                tokenizer_digest=tokenizers.pop() if len(tokenizers) == 1 else "",
                allows_trace=all(each.allows_trace for each in served),
                alias_of=tuple(each.model_id for each in served),
            )
    return found


def _model_of(welcomes: Sequence[Welcome]) -> Model:
    return Model(
        model_id=welcomes[0].model_id,
        model_digest=welcomes[0].model_digest,
        vocab_size=min(each.vocab_size for each in welcomes),
        max_model_len=min(each.max_model_len for each in welcomes),
        max_num_speculative_tokens=min(each.max_num_speculative_tokens for each in welcomes),
        num_verifiers=len(welcomes),
        tokenizer_digest=max(each.tokenizer_digest for each in welcomes),
        allows_trace=all(each.allows_trace for each in welcomes),
    )
