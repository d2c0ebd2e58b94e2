"""Translates between the client's values and the wire contract, in both directions.

A value that no message can hold (a negative count, a seed of 2**64) raises the `TandemError` that a
server would answer with. Messages to a drafter are those of `tandem.drafts.draft_exchange`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf import message
from google.rpc import error_details_pb2, status_pb2

from tandem import generation
from tandem.declared import FieldError
from tandem.messages import from_message, set_field, set_message, word_of
from tandem.v1 import gateway_pb2, sampling_pb2
from tandem.values import FinishReason, Usage

_STATUS_DETAILS = "grpc-status-details-bin"


def to_request(request: generation.GenerationRequest) -> gateway_pb2.GenerateRequest:
    """The message of a request.

    Raises:
        TandemError: INVALID_ARGUMENT naming a field whose value does not fit its wire type.
    """
    wire = gateway_pb2.GenerateRequest()
    with field_errors():
        if isinstance(request.prompt, str):
            set_field(wire, "text", request.prompt)
        else:
            wire.tokens.SetInParent()
            set_field(wire.tokens, "token_ids", request.prompt, path="tokens.")
        set_message(wire, request)
    return wire


def to_load_request(pool: str, text: str, model_id: str) -> gateway_pb2.LoadPoolRequest:
    """The message that loads a text into a pool.

    Raises:
        TandemError: see `to_request`.
    """
    wire = gateway_pb2.LoadPoolRequest()
    with field_errors():
        for field, value in (("pool", pool), ("text", text), ("model_id", model_id)):
            set_field(wire, field, value)
    return wire


@contextlib.contextmanager
def field_errors() -> Iterator[None]:
    """Raises a `TandemError` where a value does not fit its field."""
    try:
        yield
    except FieldError as error:
        raise generation.TandemError(
            grpc.StatusCode.INVALID_ARGUMENT, error.reason, field=error.field
        ) from error


def to_event(response: gateway_pb2.GenerateResponse) -> generation.Event | None:
    """The event in this message; None for an unknown one, which a newer server may send."""
    match response.WhichOneof("event"):
        case "started":
            return from_message(generation.Started, response.started)
        case "traced":
            return from_message(generation.Traced, response.traced)
        case "chunk":
            return _to_chunk(response.chunk)
        case "finished":
            finished = response.finished
            return generation.Finished(
                choice_index=finished.choice_index,
                finish_reason=_finish_reason(finished.finish_reason),
                usage=from_message(Usage, finished.usage),
            )
        case _:
            return None


def to_models(response: gateway_pb2.ListModelsResponse) -> tuple[generation.Model, ...]:
    return tuple(from_message(generation.Model, model) for model in response.models)


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


def _to_chunk(chunk: gateway_pb2.Chunk) -> generation.Chunk:
    reason = _finish_reason(chunk.finish_reason) if chunk.finish_reason else None
    return from_message(generation.Chunk, chunk, finish_reason=reason)


def _finish_reason(value: int) -> FinishReason:
    try:
        return FinishReason(word_of(sampling_pb2.FinishReason.DESCRIPTOR, value) or "")
    except ValueError:
        raise generation.TandemError(
            grpc.StatusCode.INTERNAL, f"the server sent an unknown finish reason, {value}"
        ) from None


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
