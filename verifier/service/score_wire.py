"""Converts `Score` messages from and to the engine's types, and validates requests.

The .proto file's own limits have been checked before. This module bounds a call's total of tokens
and the size of its response.
"""

from dataclasses import dataclass

from tandem.v1 import verifier_pb2
from verifier.errors import InvalidRequestError, UnsupportedFieldError
from verifier.scheduling.sequence import Scoring, ScoringMethod
from verifier.service.event_wire import add_logprobs
from verifier.service.sampling_checks import check_in_vocabulary, check_num_logprobs, check_sampling
from verifier.service.score_call import DraftsToScore, ScoreOptions, SequenceScores, drafts_to_score
from verifier.service.served_model import ServedModel

MAX_SCORE_TOKENS = 1 << 17
# In one response, at about 24 bytes each: no message is over 1 MiB.
MAX_SCORE_LOGPROBS = 1 << 15
# A response with distributions or hidden states: by default, gRPC clients take no larger one.
MAX_FULL_SCORE_BYTES = 4 << 20
# Upper bounds, in a response: of a logprob, and of a position without its logprobs and tensors.
_LOGPROB_BYTES = 24
_POSITION_BYTES = 64

_METHODS = {
    verifier_pb2.METHOD_UNSPECIFIED: ScoringMethod.SINGLE_PASS,
    verifier_pb2.METHOD_SINGLE_PASS: ScoringMethod.SINGLE_PASS,
    verifier_pb2.METHOD_BATCH_EXPANSION: ScoringMethod.BATCH_EXPANSION,
}
_TENSORS = ("probs", "logprobs", "hidden_state")
# Fields of `sampling` that ScoreRequest replaces by fields of its own.
_REPLACED_FIELDS = {"logprobs": "top_logprobs", "prompt_logprobs": "prompt_logprobs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreQuery:
    """A checked call."""

    sequences: list[DraftsToScore]
    options: ScoreOptions
    # Bytes of the distributions and hidden states in the response.
    num_tensor_bytes: int

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) + len(s.draft_token_ids) for s in self.sequences)


def score_query(message: verifier_pb2.ScoreRequest, served: ServedModel) -> ScoreQuery:
    """Checks a ScoreRequest.

    Raises:
        RequestError: names the field.
    """
    if served.max_logprobs is None:
        raise UnsupportedFieldError("logprobs are not enabled on this server", field="")
    if message.method not in _METHODS:
        raise InvalidRequestError(f"unknown value {message.method}", field="method")
    check_num_logprobs(message.top_logprobs, served, field="top_logprobs")
    for name, instead in _REPLACED_FIELDS.items():
        if message.sampling.HasField(name):  # type: ignore[arg-type]
            raise InvalidRequestError(f"use {instead}", field=f"sampling.{name}")
    sampling = check_sampling(message.sampling, served, needs_seed=False)
    if sampling.structured_output is not None:
        raise UnsupportedFieldError(
            "scores are those of free text", field="sampling.structured_output"
        )
    num_tensor_bytes = _check_size(message, served)
    return ScoreQuery(
        sequences=[
            _sequence(each, served, name=f"sequences[{index}]")
            for index, each in enumerate(message.sequences)
        ],
        options=ScoreOptions(
            scoring=Scoring(
                method=_METHODS[message.method],
                num_top=message.top_logprobs,
                prompt_logprobs=message.prompt_logprobs,
                keeps_distributions=message.distributions,
                keeps_hidden_states=message.hidden_states,
            ),
            sampling=sampling,
            stop_token_ids=served.eos_token_ids,
            cache_salt=message.cache_salt,
        ),
        num_tensor_bytes=num_tensor_bytes,
    )


def score_response(query: ScoreQuery, scored: list[SequenceScores]) -> verifier_pb2.ScoreResponse:
    """The response, in request order."""
    response = verifier_pb2.ScoreResponse()
    for sequence, scores in zip(query.sequences, scored, strict=True):
        message = response.sequences.add(unscored_reason=sequence.unscored_reason)
        for position in scores.positions:
            entry = message.positions.add(top_token_id=position.top_token_id)
            if position.draft is not None:
                entry.draft.token_id = position.draft.token_id
                entry.draft.logprob = position.draft.logprob
                entry.draft.rank = position.draft.rank
            add_logprobs(entry.top, position.top)
            for name in _TENSORS:
                if (tensor := getattr(position, name)) is not None:
                    setattr(entry, name, tensor.astype("<f4").tobytes())
        if query.options.scoring.prompt_logprobs:
            message.prompt_logprobs.add()
            add_logprobs(message.prompt_logprobs, scores.prompt_logprobs)
    return response


def _check_size(message: verifier_pb2.ScoreRequest, served: ServedModel) -> int:
    """Returns the bytes of distributions and hidden states in the response."""
    sequences = message.sequences
    if not sequences:
        raise InvalidRequestError("must not be empty", field="sequences")
    num_tokens = sum(len(s.token_ids) + len(s.draft_token_ids) for s in sequences)
    if num_tokens > MAX_SCORE_TOKENS:
        raise InvalidRequestError(
            f"{num_tokens} tokens are over the limit {MAX_SCORE_TOKENS}", field="sequences"
        )
    num_rows = sum(len(s.draft_token_ids) + 1 for s in sequences)
    if message.prompt_logprobs:
        num_rows += sum(len(s.token_ids) for s in sequences)
    num_logprobs = num_rows * (message.top_logprobs + 2)
    if num_logprobs > MAX_SCORE_LOGPROBS:
        raise InvalidRequestError(
            f"{num_logprobs} logprobs in the response are over the limit {MAX_SCORE_LOGPROBS}",
            field="prompt_logprobs" if message.prompt_logprobs else "top_logprobs",
        )
    return _check_tensors(message, served, num_logprobs)


def _check_tensors(
    message: verifier_pb2.ScoreRequest, served: ServedModel, num_logprobs: int
) -> int:
    asked = [name for name in ("distributions", "hidden_states") if getattr(message, name)]
    if not asked:
        return 0
    if not served.allows_full_scores:
        raise UnsupportedFieldError(
            f"{asked[0].replace('_', ' ')} are not enabled on this server", field=asked[0]
        )
    num_floats = message.distributions * 2 * served.vocab_size
    num_floats += message.hidden_states * served.hidden_size
    num_positions = sum(len(s.draft_token_ids) + 1 for s in message.sequences)
    num_tensor_bytes = 4 * num_positions * num_floats
    num_bytes = num_tensor_bytes + num_positions * _POSITION_BYTES + num_logprobs * _LOGPROB_BYTES
    if num_bytes > MAX_FULL_SCORE_BYTES:
        raise InvalidRequestError(
            f"{num_bytes} bytes in the response are over the limit {MAX_FULL_SCORE_BYTES}",
            field=asked[0],
        )
    return num_tensor_bytes


def _sequence(
    message: verifier_pb2.ScoreSequence, served: ServedModel, *, name: str
) -> DraftsToScore:
    token_ids = list(message.token_ids)
    field = f"{name}.token_ids"
    if not token_ids:
        raise InvalidRequestError("must not be empty", field=field)
    if len(token_ids) > served.max_model_len:
        raise InvalidRequestError(
            f"{len(token_ids)} tokens are over the model's {served.max_model_len}", field=field
        )
    check_in_vocabulary(token_ids, served, field=field)
    return drafts_to_score(
        token_ids,
        list(message.draft_token_ids),
        vocab_size=served.vocab_size,
        max_model_len=served.max_model_len,
    )
