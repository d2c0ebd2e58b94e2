"""Translates between the client's values and the wire contract, in both directions.

A value that no message can hold (a negative count, a seed of 2**64) raises the `TandemError` that a
server would answer with. Messages to a drafter are those of `tandem.draft_exchange`.
"""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf import message
from google.rpc import error_details_pb2, status_pb2

from tandem import generation
from tandem.v1 import drafter_pb2, gateway_pb2, sampling_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value", bound="DataclassInstance")
_STATUS_DETAILS = "grpc-status-details-bin"
_FINISH_REASONS: dict[int, generation.FinishReason] = {
    sampling_pb2.FINISH_REASON_STOP: generation.FinishReason.STOP,
    sampling_pb2.FINISH_REASON_LENGTH: generation.FinishReason.LENGTH,
    sampling_pb2.FINISH_REASON_CANCELLED: generation.FinishReason.CANCELLED,
}
SOURCES: dict[int, generation.DraftSource] = {
    drafter_pb2.SOURCE_SEQUENCE: generation.DraftSource.SEQUENCE,
    drafter_pb2.SOURCE_POOL: generation.DraftSource.POOL,
}


def to_request(request: generation.GenerationRequest) -> gateway_pb2.GenerateRequest:
    """The message of a request.

    Raises:
        TandemError: INVALID_ARGUMENT naming a field whose value does not fit its wire type.
    """
    wire = gateway_pb2.GenerateRequest()
    if isinstance(request.prompt, str):
        assign(wire, "text", request.prompt)
    else:
        wire.tokens.SetInParent()
        assign(wire.tokens, "token_ids", request.prompt, path="tokens.token_ids")
    for name in (
        "request_id",
        "model_id",
        "output_token_ids",
        "expected_model_digest",
        "max_new_tokens",
        "stop_sequences",
        "stop_token_ids",
        "ignore_eos",
        "n",
        "affinity_key",
        "priority",
        "trace",
        "report_tokens",
    ):
        assign(wire, name, getattr(request, name))
    _sampling(wire.sampling, request.sampling)
    _speculation(wire.speculation, request.speculation)
    return wire


def to_event(response: gateway_pb2.GenerateResponse) -> generation.Event | None:
    """The event in this message; None for an unknown one, which a newer server may send."""
    match response.WhichOneof("event"):
        case "started":
            return to_value(generation.Started, response.started)
        case "traced":
            traced = response.traced
            return generation.Traced(
                choice_index=traced.choice_index, step=_to_step_trace(traced.step)
            )
        case "chunk":
            return _to_chunk(response.chunk)
        case "finished":
            finished = response.finished
            return generation.Finished(
                choice_index=finished.choice_index,
                finish_reason=_finish_reason(finished.finish_reason),
                usage=_to_usage(finished.usage),
            )
        case _:
            return None


def to_models(response: gateway_pb2.ListModelsResponse) -> tuple[generation.Model, ...]:
    return tuple(
        to_value(
            generation.Model,
            model,
            http_sampling_defaults=to_value(
                generation.SamplingDefaults, model.http_sampling_defaults
            )
            if model.HasField("http_sampling_defaults")
            else None,
        )
        for model in response.models
    )


def to_error(error: grpc.RpcError) -> generation.TandemError:
    """The typed error of a failed call, with the field and the retry advice that it carried."""
    # Errors of both clients have these methods: grpc.Call's and grpc.aio.AioRpcError's.
    failed: Any = error
    field, retry_after_s = "", None
    text = failed.details() or ""
    for detail in _details(failed.trailing_metadata() or ()):
        violations, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if _unpacks(detail, violations) and violations.field_violations:
            field = violations.field_violations[0].field
        elif _unpacks(detail, retry):
            # Any server's words: a timedelta would overflow, and no pause is negative.
            retry_after_s = max(0.0, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
    # A server may name the field in its message too; str(TandemError) would repeat it.
    text = text.removeprefix(f"{field}: ") if field else text
    return generation.TandemError(failed.code(), text, field=field, retry_after_s=retry_after_s)


def to_value(kind: type[_Value], source: message.Message, /, **converted: Any) -> _Value:
    """A value with the message's fields of the same names; repeated fields become tuples.

    Args:
        kind: a dataclass.
        source: the message.
        converted: the fields that cannot be copied.
    """
    for field in dataclasses.fields(kind):
        if field.name not in converted:
            copied = getattr(source, field.name)
            is_single = isinstance(copied, int | float | str)
            converted[field.name] = copied if is_single else tuple(copied)
    return kind(**converted)


@contextlib.contextmanager
def own_errors(is_closed: Callable[[], bool]) -> Iterator[None]:
    """Raises a `TandemError` in place of what gRPC raises for a client's calls.

    Args:
        is_closed: whether the client was closed, which another thread or task may do while a call
            runs, or before it begins. gRPC says so in ways of its own.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise to_error(error) from error
    except asyncio.CancelledError:
        raise_if_closed(is_closed())
        raise
    except (ValueError, grpc.aio.UsageError) as error:  # the channel is closed
        if is_closed():
            raise closed_error() from error
        raise


def closed_error() -> generation.TandemError:
    """What calls of a closed client end with."""
    return generation.TandemError(grpc.StatusCode.CANCELLED, "the client is closed")


def raise_if_closed(is_closed: bool) -> None:
    """Raises what the calls of a closed client end with: in these, grpc.aio raises CancelledError,
    as if their task were cancelled.
    """
    task = asyncio.current_task()
    if is_closed and task is not None and not task.cancelling():
        raise closed_error() from None


def assign(target: message.Message, name: str, value: Any, *, path: str = "") -> None:
    """Sets a field unless the value is None.

    Raises:
        TandemError: INVALID_ARGUMENT naming `path` (or `name`); the value does not fit the field.
    """
    if value is None:
        return
    try:
        if isinstance(getattr(target, name), bool | int | float | str):
            setattr(target, name, value)
        elif isinstance(value, str | bytes):
            # It would become a value of each character.
            raise TypeError("a list is needed")
        else:
            getattr(target, name).extend(value)
    except (TypeError, ValueError) as error:
        raise generation.TandemError(
            grpc.StatusCode.INVALID_ARGUMENT, _refusal(value, error), field=path or name
        ) from error


def enum_value(enumeration: Any, prefix: str, name: str, path: str) -> Any:
    """The number of an enum's value by its short name, e.g. "vllm-kmp" of Preset.

    Raises:
        TandemError: INVALID_ARGUMENT naming `path`; there is no such value.
    """
    try:
        return enumeration.Value(f"{prefix}_{name.upper().replace('-', '_')}")
    except ValueError:
        raise generation.TandemError(
            grpc.StatusCode.INVALID_ARGUMENT, f"unknown value {name!r}", field=path
        ) from None


def _refusal(value: Any, error: Exception) -> str:
    """One line that shows the value, shortened because prompts are long."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"{shown} cannot be sent: {' '.join(str(error).split())}"


def _sampling(wire: sampling_pb2.SamplingParams, params: generation.SamplingParams) -> None:
    for name in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "min_new_tokens",
        "logprobs",
        "prompt_logprobs",
    ):
        assign(wire, name, getattr(params, name), path=f"sampling.{name}")
    try:
        wire.logit_bias.update(params.logit_bias)
    except (TypeError, ValueError) as error:
        raise generation.TandemError(
            grpc.StatusCode.INVALID_ARGUMENT,
            _refusal(dict(params.logit_bias), error),
            field="sampling.logit_bias",
        ) from error
    if params.logprobs_mode is not None:
        wire.logprobs_mode = enum_value(
            sampling_pb2.LogprobsMode,
            "LOGPROBS_MODE",
            params.logprobs_mode,
            "sampling.logprobs_mode",
        )
    if params.structured_output is not None:
        _structured_output(wire.structured_output, params.structured_output)


def _structured_output(
    wire: sampling_pb2.StructuredOutput, params: generation.StructuredOutput
) -> None:
    names = ("json_schema", "regex", "choices", "lark")
    # An empty object is a schema: of any value.
    given = [each for each in names if getattr(params, each) or getattr(params, each) == {}]
    if len(given) != 1:
        raise generation.TandemError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"exactly one of its fields must be given, not {', '.join(given) or 'none'}",
            field="sampling.structured_output",
        )
    (name,) = given
    value = getattr(params, name)
    path = f"sampling.structured_output.{name}"
    if name == "choices":
        assign(wire.choices, "values", value, path=path)
        return
    if name == "json_schema" and not isinstance(value, str):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise generation.TandemError(
                grpc.StatusCode.INVALID_ARGUMENT, f"is no JSON: {error}", field=path
            ) from error
    assign(wire, name, value, path=path)


def _speculation(
    wire: sampling_pb2.SpeculationParams, params: generation.SpeculationParams
) -> None:
    for name in (
        "enabled",
        "num_speculative_tokens",
        "prompt_lookup_min",
        "prompt_lookup_max",
        "tokens_per_match",
        "hint_tokens",
        "pool",
        "pool_min_ngram",
        "pool_keep_cancelled",
    ):
        assign(wire, name, getattr(params, name), path=f"speculation.{name}")
    for name, prefix, enumeration in (
        ("preset", "PRESET", sampling_pb2.Preset),
        ("overlap", "OVERLAP", drafter_pb2.Overlap),
        ("tie", "TIE", drafter_pb2.Tie),
        ("algorithm", "ALGORITHM", drafter_pb2.Algorithm),
        ("pool_keep", "KEEP", drafter_pb2.Keep),
    ):
        value = getattr(params, name)
        if value is not None:
            number = enum_value(enumeration, prefix, value, f"speculation.{name}")
            setattr(wire, name, number)


def _to_chunk(chunk: gateway_pb2.Chunk) -> generation.Chunk:
    return generation.Chunk(
        choice_index=chunk.choice_index,
        offset=chunk.offset,
        token_ids=tuple(chunk.token_ids),
        text=chunk.text,
        num_draft_tokens=chunk.num_draft_tokens,
        num_accepted_tokens=chunk.num_accepted_tokens,
        num_steps=chunk.num_steps,
        logprobs=tuple(_to_logprob(entry) for entry in chunk.logprobs),
        prompt_logprobs=tuple(_to_logprob(entry) for entry in chunk.prompt_logprobs),
        finish_reason=_finish_reason(chunk.finish_reason) if chunk.finish_reason else None,
        reported_tokens=tuple(
            to_value(generation.ReportedToken, entry) for entry in chunk.reported_tokens
        ),
    )


def _to_step_trace(step: sampling_pb2.StepTrace) -> generation.StepTrace:
    proposals = tuple(
        to_value(generation.ProposalTrace, proposal, source=SOURCES.get(proposal.source))
        for proposal in step.proposals
    )
    return to_value(generation.StepTrace, step, proposals=proposals)


def _to_logprob(entry: sampling_pb2.TokenLogprob) -> generation.TokenLogprob:
    return generation.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top=tuple(_to_logprob(other) for other in entry.top),
    )


def _finish_reason(value: int) -> generation.FinishReason:
    try:
        return _FINISH_REASONS[value]
    except KeyError:
        raise generation.TandemError(
            grpc.StatusCode.INTERNAL, f"the server sent an unknown finish reason, {value}"
        ) from None


def _to_usage(usage: gateway_pb2.Usage) -> generation.Usage:
    by_match_length = tuple(
        to_value(generation.MatchAcceptance, acceptance) for acceptance in usage.by_match_length
    )
    return to_value(generation.Usage, usage, by_match_length=by_match_length)


def _details(metadata: Any) -> list[Any]:
    """The packed details of a google.rpc.Status in trailing metadata; none when unreadable."""
    for key, value in metadata:
        if key == _STATUS_DETAILS:
            try:
                return list(status_pb2.Status.FromString(value).details)
            except message.DecodeError:
                return []
    return []


def _unpacks(detail: Any, into: message.Message) -> bool:
    """Whether a detail is of this type and can be read; only then `into` is its content."""
    try:
        return bool(detail.Unpack(into))
    except message.DecodeError:
        return False
