"""Every declared parameter, over gRPC and HTTP through all services: a new one is tested as it is.

Only the target model is scripted.
"""

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio

from servicekit.errors import field_violation
from tandem.client import GenerationRequest, SamplingParams, SpeculationParams, TandemError
from tandem.declared import UINT32, Parameter, declared
from tandem.messages import from_message, set_field
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.gateway.openai.clients import Answer, post
from tests.integration.scripted_model import loaded, model_of_script
from tests.integration.stack import LOOPBACK, MODEL, Stack, running_stack
from tests.verifier.running_verifier import ClientSession
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.service import command_wire as wire

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMETERS = [
    (path, each)
    for path, kind in (("sampling", SamplingParams), ("speculation", SpeculationParams))
    for each in declared(kind)
]


def each_of(parameters: Sequence[tuple[str, Parameter]]) -> pytest.MarkDecorator:
    names = [f"{path}.{parameter.name}" for path, parameter in parameters]
    return pytest.mark.parametrize(("path", "parameter"), parameters, ids=names)


# What each request has beside, so that every value inside a range is valid and has an effect.
SAMPLING: dict[str, Any] = {"seed": 7, "logprobs": 1}
SPECULATION: dict[str, Any] = {"pool": "p", "prompt_lookup_min": 1, "prompt_lookup_max": 32}
# What a verifier is not told when a sequence opens.
TOLD_AT_THE_END = ("pool_keep_cancelled",)
PROMPT = [5, 6, 7]


def at_edges(parameter: Parameter) -> list[Any]:
    """Values that are accepted: all, or those at the ends of the range."""
    if parameter.range is None:
        return list(parameter.choices or ([True, False] if parameter.type is bool else ["other"]))
    # How much of what a message can hold is accepted, depends on the model.
    if parameter.range == UINT32:
        return [1]
    low, high = parameter.range.low, parameter.range.high
    least = math.nextafter(low, math.inf) if parameter.range.is_above else low
    return as_given(parameter, [least, high if math.isfinite(high) else low + 1])


def beyond(parameter: Parameter, low: float | None = None) -> list[Any]:
    """Values that are refused; of numbers those next to the ends of the range."""
    if parameter.range is None:
        return ["no such word"] if parameter.choices else []
    low = parameter.range.low if low is None else low
    high = parameter.range.high
    if parameter.type is int:
        return [int(low) - 1, int(high) + 1]
    least = low if parameter.range.is_above else math.nextafter(low, -math.inf)
    return as_given(parameter, [least, math.nextafter(high, math.inf), math.nan])


def as_given(parameter: Parameter, numbers: Sequence[float]) -> list[Any]:
    if isinstance(parameter.default, dict):
        return [{5: each} for each in numbers]
    return [int(each) if parameter.type is int else each for each in numbers]


def load_scripted(config: VerifierConfig) -> LoadedModel:
    model = model_of_script({}, vocab_size=2048)
    return loaded(model, config, max_model_len=64, max_num_speculative_tokens=31)


@dataclasses.dataclass
class Services:
    """The services, and what their verifier was told of each sequence."""

    stack: Stack
    opens: list[verifier_pb2.Open]

    async def send(self, path: str, parameter: Parameter, value: Any) -> verifier_pb2.Open:
        """A request with a parameter, by the client."""
        asked = {"sampling": SAMPLING, "speculation": SPECULATION}
        asked[path] = asked[path] | {parameter.name: value}
        await self.stack.client.generate(
            GenerationRequest(
                prompt=PROMPT,
                max_new_tokens=2,
                sampling=SamplingParams(**asked["sampling"]),
                speculation=SpeculationParams(**asked["speculation"]),
            )
        )
        return self.opens[-1]

    async def post(self, path: str, parameter: Parameter, value: Any) -> Answer:
        """The same over HTTP."""
        body = {"model": "scripted", "prompt": PROMPT, "max_tokens": 2, **SAMPLING}
        body["speculation"] = dict(SPECULATION)
        (body if path == "sampling" else body["speculation"])[parameter.http_name] = value
        return await post(self.stack, "/v1/completions", body)

    async def generate(self, asked: gateway_pb2.GenerateRequest) -> None:
        """A message to the gateway, with what no client sends."""
        async with grpc.aio.insecure_channel(self.stack.gateway.server.address) as channel:
            async for _ in gateway_pb2_grpc.GenerationServiceStub(channel).Generate(asked):
                pass


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services() -> AsyncIterator[Services]:
    opens: list[verifier_pb2.Open] = []
    open_sequence = wire.open_sequence

    def record(message: verifier_pb2.Open, *args: Any, **options: Any) -> Any:
        opens.append(message)
        return open_sequence(message, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "open_sequence", record)
        async with running_stack(
            verifier=VerifierConfig(server=LOOPBACK, model=MODEL, numerics="fast"),
            load=load_scripted,
        ) as stack:
            yield Services(stack, opens)


@each_of(PARAMETERS)
async def test_every_value_inside_the_range_arrives_at_the_verifier(
    services: Services, path: str, parameter: Parameter
) -> None:
    defaults = {"sampling": SAMPLING, "speculation": SPECULATION}[path]
    plain = await services.send(path, parameter, defaults.get(parameter.name, parameter.default))
    drafting = set()
    for value in at_edges(parameter):
        opened = await services.send(path, parameter, value)
        over_http = None
        if parameter.http_name:
            answer = await services.post(path, parameter, value)
            assert answer.status == 200, answer.body
            over_http = services.opens[-1]
            assert drafting_of(over_http) == drafting_of(opened)
        if path == "sampling":
            for told in filter(None, (opened, over_http)):
                told_params = from_message(SamplingParams, told.sampling)
                assert getattr(told_params, parameter.name) == value
        drafting.add(drafting_of(opened))
    if path == "speculation" and parameter.name not in TOLD_AT_THE_END:
        assert drafting - {drafting_of(plain)}, "nobody is told of it"


def drafting_of(opened: verifier_pb2.Open) -> bytes:
    """All that an Open says of other things than sampling."""
    copy = verifier_pb2.Open()
    copy.CopyFrom(opened)
    for name in ("sequence_id", "sampling"):
        copy.ClearField(name)
    return copy.SerializeToString(deterministic=True)


@each_of(PARAMETERS)
async def test_no_value_outside_the_range_passes_the_gateway(
    services: Services, path: str, parameter: Parameter
) -> None:
    """Whether the client refuses it, which no message can hold, or the gateway."""
    num_opens = len(services.opens)
    for value in beyond(parameter):
        with pytest.raises(TandemError) as caught:
            await services.send(path, parameter, value)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.field == f"{path}.{parameter.name}", value
    if parameter.choices:
        asked = gateway_pb2.GenerateRequest(tokens=gateway_pb2.TokenIds(token_ids=PROMPT))
        setattr(getattr(asked, path), parameter.name, 77)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await services.generate(asked)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field_violation(failed.value) == (f"{path}.{parameter.name}", "has no value 77")
    assert len(services.opens) == num_opens


@each_of([each for each in PARAMETERS if each[1].http_name])
async def test_no_value_outside_the_range_passes_http(
    services: Services, path: str, parameter: Parameter
) -> None:
    num_opens = len(services.opens)
    for value in beyond(parameter, parameter.http_low):
        answer = await services.post(path, parameter, value)
        assert answer.status == 400, value
        place = parameter.http_name if path == "sampling" else f"{path}.{parameter.http_name}"
        named = answer.error["param"]
        assert (named == place) or named.startswith(f"{place}."), value
    assert len(services.opens) == num_opens
    if parameter.http_low is not None:
        assert (await services.post(path, parameter, int(parameter.http_low))).status == 200


async def test_a_verifiers_session_refuses_the_same_values_of_sampling(services: Services) -> None:
    """Its clients may be others than gateways."""
    bad: list[tuple[str, verifier_pb2.Open]] = []
    for parameter in declared(SamplingParams):
        values = [each for each in beyond(parameter) if parameter.type is not int]
        for value in [77] if parameter.choices else values:
            opened = verifier_pb2.Open(sequence_id=str(len(bad)), token_ids=PROMPT)
            opened.max_new_tokens = 2
            if parameter.choices:
                setattr(opened.sampling, parameter.name, value)
            else:
                set_field(opened.sampling, parameter.name, value)
            bad.append((f"sampling.{parameter.name}", opened))
    async with grpc.aio.insecure_channel(services.stack.verifier.server.address) as channel:
        session = ClientSession(verifier_pb2_grpc.VerifierServiceStub(channel).Session())
        await session.hello()
        await session.open(*(opened for _, opened in bad))
        await session.wait_rejected(len(bad))
        refused = {each.sequence_id: (each.field, each.code) for each in session.rejected()}
        assert refused == {opened.sequence_id: (field, 3) for field, opened in bad}
        await session.call.done_writing()
    await asyncio.wrap_future(services.stack.engine.when_idle())
