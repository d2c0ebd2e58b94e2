"""Bad input (docs/acceptance.md): a bad request is refused by field name and disturbs nobody."""

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from servicekit.errors import field_violation
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc as rpc
from tandem.v1 import sampling_pb2
from tests.integration.stack import Stack, running_stack

TOKENS = pb.TokenIds(token_ids=[5, 6, 7])


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"tokens": TOKENS, "max_new_tokens": 4, **fields})  # type: ignore[arg-type]


def sampling(**fields: object) -> pb.GenerateRequest:
    return request(sampling=sampling_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


def speculation(**fields: object) -> pb.GenerateRequest:
    return request(speculation=sampling_pb2.SpeculationParams(**fields))  # type: ignore[arg-type]


INVALID = {
    "empty tokens": (pb.GenerateRequest(tokens=pb.TokenIds()), "tokens.token_ids"),
    "empty text": (pb.GenerateRequest(text=""), "text"),
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "token id out of range": (
        pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[5, 2048])),
        "tokens.token_ids",
    ),
    "negative temperature": (sampling(temperature=-0.5), "sampling.temperature"),
    "NaN temperature": (sampling(temperature=float("nan")), "sampling.temperature"),
    "top_p of 2": (sampling(top_p=2.0), "sampling.top_p"),
    "top_p of 0": (sampling(top_p=0.0), "sampling.top_p"),
    "min_p over 1": (sampling(min_p=1.5), "sampling.min_p"),
    "penalty over 2": (sampling(frequency_penalty=2.5), "sampling.frequency_penalty"),
    "bias over 100": (sampling(logit_bias={5: 101.0}), "sampling.logit_bias"),
    "bias of an id out of range": (sampling(logit_bias={2048: 1.0}), "sampling.logit_bias"),
    "too many logprobs": (sampling(logprobs=21), "sampling.logprobs"),
    "too many prompt logprobs": (sampling(prompt_logprobs=21), "sampling.prompt_logprobs"),
    "unknown model": (request(model_id="another"), "model_id"),
    "too long": (
        pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[5] * 2048)),
        "tokens.token_ids",
    ),
    "too long text": (pb.GenerateRequest(text="word " * 4000), "text"),
    "nothing to generate": (request(max_new_tokens=0), "max_new_tokens"),
    "k over the maximum": (
        speculation(num_speculative_tokens=32),
        "speculation.num_speculative_tokens",
    ),
    "n under 1": (speculation(prompt_lookup_min=0), "speculation.prompt_lookup_min"),
    "min over max": (
        speculation(prompt_lookup_min=4, prompt_lookup_max=3),
        "speculation.prompt_lookup_min",
    ),
    "empty stop": (request(stop_sequences=[""]), "stop_sequences"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as running:
        yield running


async def refused(stack: Stack, bad: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """Returns the error of a bad request; a good one is served beside it and another after it."""
    async with grpc.aio.insecure_channel(stack.gateway.server.address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        beside = stub.Generate(request(max_new_tokens=12, ignore_eos=True))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(bad):
                pass
        for call in (beside, stub.Generate(request())):
            events = [response.WhichOneof("event") async for response in call]
            assert events[0] == "started"
            assert events[-1] == "finished"
    await stack.check_idle()
    return caught.value


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", INVALID)
async def test_a_bad_request_is_refused_by_field_name_and_others_are_served(
    kind: str, stack: Stack
) -> None:
    bad, field = INVALID[kind]
    error = await refused(stack, bad)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    violation = field_violation(error)
    assert violation is not None
    assert violation[0].split("[")[0] == field
