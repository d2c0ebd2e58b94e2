"""Checks the fields that an Open and a `Score` request share: sampling parameters, token ids."""

from collections.abc import Iterable

from servicekit.unknown_fields import find_unknown_field
from tandem.declared import FieldError, check_ranges
from tandem.messages import from_message
from tandem.v1 import sampling_pb2
from tandem.values import SamplingParams
from verifier.errors import InvalidRequestError, UnsupportedFieldError
from verifier.service.served_model import ServedModel


def check_in_vocabulary(token_ids: Iterable[int], served: ServedModel, *, field: str) -> None:
    largest = max(token_ids, default=0)
    if largest >= served.vocab_size:
        raise InvalidRequestError(
            f"token id {largest} is outside the vocabulary of {served.vocab_size}", field=field
        )


def check_num_logprobs(num_logprobs: int | None, served: ServedModel, *, field: str) -> None:
    """Checks the number of likeliest tokens requested; None: no logprobs requested.

    Raises:
        RequestError: the server offers none, or fewer.
    """
    if num_logprobs is None:
        return
    if served.max_logprobs is None:
        raise UnsupportedFieldError("logprobs are not enabled on this server", field=field)
    if num_logprobs > served.max_logprobs:
        raise InvalidRequestError(
            f"{num_logprobs} is over the limit {served.max_logprobs}", field=field
        )


def check_sampling(
    message: sampling_pb2.SamplingParams, served: ServedModel, *, needs_seed: bool = True
) -> SamplingParams:
    """Checks the parameters of one sequence; `needs_seed`: temperature > 0 requires a seed.

    Raises:
        RequestError: names the field.
    """
    if unknown := find_unknown_field(message):
        raise UnsupportedFieldError(
            f"this version does not know field {unknown}", field=f"sampling.{unknown}"
        )
    try:
        sampling = from_message(SamplingParams, message, path="sampling.")
        check_ranges(sampling, path="sampling.")
    except FieldError as error:
        raise InvalidRequestError(error.reason, field=error.field) from None
    check_in_vocabulary(sampling.logit_bias, served, field="sampling.logit_bias")
    check_num_logprobs(sampling.logprobs, served, field="sampling.logprobs")
    check_num_logprobs(sampling.prompt_logprobs, served, field="sampling.prompt_logprobs")
    if needs_seed and sampling.temperature > 0 and sampling.seed is None:
        raise InvalidRequestError("must be set with temperature > 0", field="sampling.seed")
    return sampling
