"""Around every call: the request id, the metrics, the errors; for all four shapes of a method."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc import status_pb2

from servicekit.errors import field_violation, retry_after_ms
from servicekit.interceptors.base import CallFailedError
from servicekit.interceptors.request_id import RequestIdInterceptor
from tests.servicekit.factories import InvalidValueError

SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


TABLE = {InvalidValueError: grpc.StatusCode.INVALID_ARGUMENT}


def text(value: str) -> StringValue:
    return StringValue(value=value)


def behaviour(shape: str, act: Callable[[Any], Awaitable[str]]) -> Any:
    """A handler that answers with what `act(context)` returns; a stream says `first` before."""

    async def respond(request: Any, context: Any) -> StringValue:
        if shape.startswith("stream"):
            async for _ in request:
                pass
        return text(await act(context))

    async def respond_with_stream(request: Any, context: Any) -> AsyncIterator[StringValue]:
        yield text("first")
        yield await respond(request, context)

    return {shape: respond if shape.endswith("unary") else respond_with_stream}


def call(running: Any, shape: str, **options: Any) -> Any:
    if shape.startswith("unary"):
        return running.method(shape)(text("hello"), **options)
    return running.method(shape)(iter([text("hello"), text("again")]), **options)


async def responses(shape: str, ongoing: Any) -> list[str]:
    """All that the call answers; raises as it ends."""
    if shape.endswith("unary"):
        return [(await ongoing).value]
    return [response.value async for response in ongoing]


async def failure(shape: str, ongoing: Any) -> tuple[list[str], grpc.aio.AioRpcError]:
    """What the call answers before it fails, and how it fails."""
    received = []

    async def receive() -> None:
        if shape.endswith("unary"):
            await ongoing
            return
        async for response in ongoing:
            received.append(getattr(response, "value", response))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await receive()
    return received, caught.value


def request_id_of(trailing_metadata: Any) -> str:
    values = [value for key, value in trailing_metadata if key == "x-request-id"]
    assert len(values) == 1
    return str(values[0])


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_call_gets_its_answer_and_its_request_id_back(
    start_server: Any, shape: str
) -> None:
    seen = []

    async def act(_context: Any) -> str:
        seen.append(structlog.contextvars.get_contextvars()["request_id"])
        return "done"

    running = await start_server(behaviour(shape, act))
    ongoing = call(running, shape, metadata=(("x-request-id", "from-client"),))
    expected = ["done"] if shape.endswith("unary") else ["first", "done"]
    assert await responses(shape, ongoing) == expected
    assert request_id_of(await ongoing.trailing_metadata()) == "from-client"
    assert seen == ["from-client"]
    assert running.num_requests("OK") == 1
    assert running.log_entries == []


async def test_a_request_id_is_made_where_none_or_a_monstrous_one_is_given(
    start_server: Any,
) -> None:
    async def act(_context: Any) -> str:
        return str(structlog.contextvars.get_contextvars()["request_id"])

    running = await start_server(behaviour("unary_unary", act))
    seen = set()
    for given in (None, None, "", "x" * 129):
        metadata = () if given is None else (("x-request-id", given),)
        ongoing = call(running, "unary_unary", metadata=metadata)
        request_id = request_id_of(await _done(ongoing))
        assert (await ongoing).value == request_id
        assert len(request_id) == 32
        seen.add(request_id)
    assert len(seen) == 4
    longest = "x" * 128
    ongoing = call(running, "unary_unary", metadata=(("x-request-id", longest),))
    assert (await ongoing).value == longest


async def _done(ongoing: Any) -> Any:
    await ongoing
    return await ongoing.trailing_metadata()


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_error_in_the_table_becomes_its_status_with_details(
    start_server: Any, shape: str
) -> None:
    async def act(context: Any) -> str:
        context.set_trailing_metadata((*context.trailing_metadata(), ("mine", "kept")))
        raise InvalidValueError("top_p is 2", field="sampling.top_p", retry_after_ms=40)

    running = await start_server(behaviour(shape, act), error_table=TABLE)
    ongoing = call(running, shape, metadata=(("x-request-id", "r1"),))
    received, error = await failure(shape, ongoing)
    assert received == ([] if shape.endswith("unary") else ["first"])
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "top_p is 2"
    assert field_violation(error) == ("sampling.top_p", "top_p is 2")
    assert retry_after_ms(error) == 40
    assert request_id_of(error.trailing_metadata()) == "r1"
    assert ("mine", "kept") in list(error.trailing_metadata())
    assert running.num_requests("INVALID_ARGUMENT") == 1
    assert running.log_entries == []


@pytest.mark.parametrize("shape", SHAPES)
async def test_any_other_error_is_internal_logged_once_and_leaks_nothing(
    start_server: Any, shape: str
) -> None:
    async def act(_context: Any) -> str:
        raise ValueError("the password is tulip")

    running = await start_server(behaviour(shape, act), error_table=TABLE)
    ongoing = call(running, shape, metadata=(("x-request-id", "r1"),))
    _, error = await failure(shape, ongoing)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "internal error"
    assert "tulip" not in str(list(error.trailing_metadata()))
    assert request_id_of(error.trailing_metadata()) == "r1"
    assert running.num_requests("INTERNAL") == 1
    (entry,) = running.log_entries
    assert entry["event"] == "rpc_failed"
    assert entry["method"] == "/test.v1.EchoService/Echo"
    assert entry["request_id"] == "r1"
    assert entry["exc_info"]
    # It was this one call that failed, not the server.
    _, error = await failure(shape, call(running, shape))
    assert running.num_requests("INTERNAL") == 2


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_handlers_own_abort_stands(start_server: Any, shape: str) -> None:
    async def act(context: Any) -> str:
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "mine")
        return "never"

    running = await start_server(behaviour(shape, act))
    _, error = await failure(shape, call(running, shape, metadata=(("x-request-id", "r1"),)))
    assert (error.code(), error.details()) == (grpc.StatusCode.ALREADY_EXISTS, "mine")
    assert request_id_of(error.trailing_metadata()) == "r1"
    await running.counted("ALREADY_EXISTS")
    assert running.log_entries == []


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_cancelled_call_ends_its_handler_and_is_counted(
    start_server: Any, shape: str
) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def act(_context: Any) -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    running = await start_server(behaviour(shape, act))
    ongoing = call(running, shape)
    await started.wait()
    ongoing.cancel()
    async with asyncio.timeout(20):
        await ended.wait()
    await running.counted("CANCELLED")
    assert running.log_entries == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("what", ["handler", "future"])
async def test_a_call_that_the_service_cancels_is_answered(
    start_server: Any, shape: str, what: str
) -> None:
    started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def act(_context: Any) -> str:
        awaited = asyncio.get_running_loop().create_future()
        started.set_result(asyncio.current_task() if what == "handler" else awaited)
        await awaited
        return "never"

    running = await start_server(behaviour(shape, act))
    ongoing = call(running, shape, metadata=(("x-request-id", "r1"),))
    (await started).cancel()
    async with asyncio.timeout(20):
        _, error = await failure(shape, ongoing)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert request_id_of(error.trailing_metadata()) == "r1"
    assert running.num_requests("CANCELLED") == 1
    assert running.log_entries == []


async def test_a_call_that_grpc_has_ended_before_its_error_is_sent_is_no_error() -> None:
    """As with a compressed message that expands over the limit, in a race that no test can time.

    gRPC logs what a handler raises, except for a cancellation.
    """

    class OverContext:
        def invocation_metadata(self) -> tuple[()]:
            return ()

        def set_trailing_metadata(self, _metadata: Any) -> None:
            pass

        def trailing_metadata(self) -> tuple[()]:
            return ()

        def done(self) -> bool:
            return False

        async def abort(self, *_status: Any) -> None:
            raise grpc.aio.InternalError('Failed "execute_batch"')

    async def fail(_request: Any, _context: Any) -> None:
        raise CallFailedError(status_pb2.Status(code=3, message="no message came"))

    async def cancel(_request: Any, _context: Any) -> None:
        raise asyncio.CancelledError

    for behave in (fail, cancel):
        handler: Any = grpc.unary_unary_rpc_method_handler(behave)
        wrapped: Any = RequestIdInterceptor().wrap(handler, "/test/Echo").unary_unary
        with pytest.raises(asyncio.CancelledError):
            await wrapped(b"", OverContext())


async def test_a_generator_that_is_left_is_closed_at_once(start_server: Any) -> None:
    """At once: before the call counts as ended, not when the collector finds the generator."""
    closed: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def flood(_request: Any, _context: Any) -> AsyncIterator[StringValue]:
        try:
            while True:
                yield text("x" * 100_000)
        finally:
            closed.set_result(running.num_requests("CANCELLED"))

    running = await start_server({"unary_stream": flood})
    ongoing = running.method("unary_stream")(text("go"))
    await ongoing.read()
    ongoing.cancel()
    async with asyncio.timeout(20):
        assert await closed == 0
    await running.counted("CANCELLED")
    assert running.log_entries == []


async def test_an_unknown_method_is_counted_without_its_name(start_server: Any) -> None:
    running = await start_server()
    for name in ("Nope", "Nada"):
        _, error = await failure("unary_unary", running.method("unary_unary", name)(text("x")))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert running.num_requests("UNIMPLEMENTED", name="unknown", service="unknown") == 2
    labels = str(
        [sample.labels for metric in running.registry.collect() for sample in metric.samples]
    )
    assert "Nope" not in labels
    assert "Nada" not in labels


@pytest.mark.parametrize("shape", SHAPES)
async def test_bytes_that_are_no_message_are_the_callers_mistake(
    start_server: Any, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(_context: Any) -> str:
        return "done"

    running = await start_server(behaviour(shape, act))
    garbage = b"\xff\xff\xff"
    request = garbage if shape.startswith("unary") else iter([garbage])
    _, error = await failure(shape, running.raw_method(shape)(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a message that /test.v1.EchoService/Echo accepts" in (error.details() or "")
    assert running.num_requests("INVALID_ARGUMENT") == 1
    assert running.log_entries == []
    assert caplog.records == []
    assert (await responses(shape, call(running, shape)))[-1] == "done"


async def test_the_errors_of_calls_that_a_handler_makes_are_not_its_answer(
    start_server: Any,
) -> None:
    """A peer's status must not pass for this server's own, nor gRPC's word for a closed channel."""
    peer = await start_server()

    async def act(_context: Any) -> str:
        response = await peer.method("unary_unary", "Nope")(text("x"))
        return str(response.value)

    running = await start_server(behaviour("unary_unary", act))
    for _ in range(2):
        _, error = await failure("unary_unary", call(running, "unary_unary"))
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
        await peer.channel.close()
    assert len(running.log_entries) == 2
