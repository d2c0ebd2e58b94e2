"""Makes one call with given inputs, and checks its end and its responses.

Owns the definition of a clean end. Requests and responses are bytes, so that invalid messages can
be sent. Methods are found by reflection.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default as default_pool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import proto_reflection_descriptor_database as reflection

from servicekit.channels.limits import MAX_RECEIVE_BYTES
from servicekit.errors import field_violation, retry_after_ms
from servicekit.interceptors.request_id import REQUEST_ID_KEY
from tests.drills.fleet import Member
from tests.fuzz.answers import AnswerError, check_answers
from tests.fuzz.messages import MessageMaker

# Every call must end within this time.
BOUND_S = 60.0
# A stream of responses that lasts longer, or has more messages, is cancelled.
_PATIENCE_S = 1.0
_MOST_ANSWERS = 400

# Details of a status that grpc.aio sets itself.
_LOST_DETAILS = "Internal error from Core"

# Statuses with which any call may end.
_ALWAYS_CLEAN = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of a running service."""

    service: Member
    descriptor: MethodDescriptor

    @property
    def path(self) -> str:
        service = self.descriptor.containing_service
        assert service is not None, "a method is in a service"
        return f"/{service.full_name}/{self.descriptor.name}"

    @property
    def is_ours(self) -> bool:
        """Whether it is Tandem's, unlike health and reflection."""
        return self.path.startswith("/tandem.")

    @property
    def name(self) -> str:
        return f"{self.service.name} {self.path.rpartition('.')[2]}"


@dataclass(slots=True, kw_only=True)
class Call:
    """A call: its inputs and its result.

    Attributes:
        number: repeats it, with the seed.
        code: None until it ended.
        is_cancelled: by the client, also by leaving before its end.
        is_lost: the server ended it while the client wrote, and grpc.aio reports INTERNAL of its
            own. The server counts the real status, see `campaign.py`.
        is_left_early: the server ended it before the client did.
        failure: the error found; "" if there is none.
    """

    number: int
    method: Method
    inputs: Sequence[bytes]
    num_sent: int = 0
    answers: list[bytes] = field(default_factory=list)
    is_cancelled: bool = False
    is_lost: bool = False
    is_left_early: bool = False
    code: grpc.StatusCode | None = None
    failure: str = ""


def find_methods(services: Sequence[Member]) -> list[Method]:
    """Every method of every service, by reflection.

    Raises:
        KeyError: this process does not know a service.
    """
    methods = []
    for service in services:
        with grpc.insecure_channel(service.address) as channel:
            names = list(reflection.ProtoReflectionDescriptorDatabase(channel).get_services())
        for name in sorted(names):
            for descriptor in default_pool().FindServiceByName(name).methods:
                methods.append(Method(service=service, descriptor=descriptor))
    return methods


class Caller:
    """Makes calls over one connection to each service, on one event loop."""

    def __init__(self, services: Sequence[Member]) -> None:
        self._channels = {
            service.name: grpc.aio.insecure_channel(
                service.address, options=[("grpc.max_send_message_length", -1)]
            )
            for service in services
        }

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def make(self, method: Method, number: int, seed: int) -> Call:
        """Makes the call of this number, and checks it."""
        draw = random.Random(f"{seed}-{number}")
        descriptor = method.descriptor
        call = Call(
            number=number,
            method=method,
            inputs=MessageMaker(draw).inputs(
                descriptor.input_type, is_stream=descriptor.client_streaming
            ),
        )
        call.is_cancelled = draw.random() < 0.08
        pause_s = draw.choice((0.0, 0.0, 0.02, 0.3))
        try:
            async with asyncio.timeout(BOUND_S):
                rpc = await self._exchange(call, pause_s)
                call.code = await rpc.code()
                call.failure = await _judge(call, rpc)
        except TimeoutError:
            call.failure = f"it did not end within {BOUND_S} s"
        return call

    async def _exchange(self, call: Call, pause_s: float) -> Any:
        """Sends and reads until the call ends or is cancelled.

        Returns:
            gRPC's call object, of any of the four kinds.
        """
        channel, method = self._channels[call.method.service.name], call.method.descriptor
        path = call.method.path
        make: Any = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }[method.client_streaming, method.server_streaming]
        # So the services' log lines name the call.
        metadata = ((REQUEST_ID_KEY, f"call-{call.number}"),)
        if method.client_streaming:
            rpc = make(path)(metadata=metadata)
        else:
            rpc = make(path)(call.inputs[0], metadata=metadata)
            call.num_sent = 1
        reader = asyncio.create_task(_read(call, rpc, is_stream=method.server_streaming))
        try:
            if method.client_streaming:
                await _write(call, rpc, reader, min(pause_s, 0.02))
                await asyncio.wait({reader}, timeout=pause_s)
            if call.is_cancelled:
                await asyncio.wait({reader}, timeout=pause_s)
                # It may have ended before; its end is checked like any other.
                call.is_cancelled = rpc.cancel()
            elif method.client_streaming:
                call.is_left_early = rpc.done()
                if not rpc.done():
                    # The server may be gone, and gRPC know it before the call does.
                    with contextlib.suppress(*_ENDED):
                        await rpc.done_writing()
            elif method.server_streaming:
                patience_s = _PATIENCE_S if call.method.is_ours else _PATIENCE_S / 20
                await asyncio.wait({reader}, timeout=patience_s)
                while not reader.done() and not call.answers:
                    await asyncio.wait({reader}, timeout=patience_s)
                if not reader.done():
                    call.is_cancelled = rpc.cancel()
            await reader
        finally:
            reader.cancel()
            if not rpc.done():
                rpc.cancel()
        return rpc


# What a write raises where the call has ended.
_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError)


async def _write(call: Call, rpc: Any, reader: "asyncio.Task[None]", pause_s: float) -> None:
    for message in call.inputs:
        if reader.done():
            return
        try:
            await rpc.write(message)
        except _ENDED:
            return  # it has ended already
        call.num_sent += 1
        if pause_s:
            await asyncio.wait({reader}, timeout=pause_s)


async def _read(call: Call, rpc: Any, *, is_stream: bool) -> None:
    try:
        if not is_stream:
            call.answers.append(await rpc)
            return
        while len(call.answers) < _MOST_ANSWERS:
            answer = await rpc.read()
            if answer is grpc.aio.EOF:
                return
            call.answers.append(answer)
        call.is_cancelled = rpc.cancel()
    except grpc.aio.AioRpcError:
        pass  # the code shows it too
    except asyncio.CancelledError:
        if not rpc.cancelled():
            raise


async def _judge(call: Call, rpc: Any) -> str:
    """Returns the error of the call's end or responses; "" if there is none."""
    code, details = call.code, await rpc.details() or ""
    assert code is not None
    error = grpc.aio.AioRpcError(
        code, await rpc.initial_metadata(), await rpc.trailing_metadata(), details=details
    )
    call.is_lost = code is grpc.StatusCode.INTERNAL and details == _LOST_DETAILS
    if not call.is_lost and not _is_clean(call, error):
        return f"it ended with {code.name}: {details}"
    if call.is_left_early and code is grpc.StatusCode.OK:
        return "the server ended the stream, and gave no reason"
    is_parsed, requests = True, []
    for serialized in call.inputs[: call.num_sent]:
        try:
            request_class = GetMessageClass(call.method.descriptor.input_type)
            requests.append(request_class.FromString(serialized))
        except DecodeError:
            is_parsed = False
            break
    if not is_parsed and code is grpc.StatusCode.OK:
        return "bytes that are no message were taken for one"
    answers: list[Message] = []
    answer_class = GetMessageClass(call.method.descriptor.output_type)
    try:
        answers.extend(answer_class.FromString(serialized) for serialized in call.answers)
        check_answers(call.method.path, requests, answers, is_complete=code is grpc.StatusCode.OK)
    except (AnswerError, DecodeError) as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def _is_clean(call: Call, error: grpc.aio.AioRpcError) -> bool:
    code = error.code()
    if code in _ALWAYS_CLEAN:
        return True
    if code is grpc.StatusCode.CANCELLED:
        return call.is_cancelled
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return field_violation(error) is not None  # refused by name
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # Overload names a time to retry; the transport reports messages that are too large for it.
        is_large = any(len(message) > MAX_RECEIVE_BYTES for message in call.inputs)
        return retry_after_ms(error) is not None or is_large
    if code is grpc.StatusCode.NOT_FOUND:
        return call.method.path == "/grpc.health.v1.Health/Check"
    return False
