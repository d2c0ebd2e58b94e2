"""No legal request, however large, blocks the gateway's event loop.

What counts is the work of the gateway and gRPC alone: client and verifier are threads of their own.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest

from gateway.generation.generation import Generation
from gateway.text.tokenizer import Tokenizer
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc, sampling_pb2, verifier_pb2
from tests.gateway.conftest import MODEL_FOLDER
from tests.gateway.running_gateway import RunningGateway, StartGateway
from tests.gateway.threaded_verifier import (
    MAX_MODEL_LEN,
    ThreadedVerifier,
    decided,
    one_token,
    threaded_verifiers,
)
from tests.work import MAX_WORK, Turns, Weights, counted

pytestmark = pytest.mark.stand_in

MOST_BYTES = 4 << 20
HALF = MAX_MODEL_LEN // 2

# A stop string that the text below begins with again and again, and never completes.
STOPS = ["def add(" * 31 + chr(ord("a") + index) for index in range(16)]
CODE = "def add(a, b):\n    return a + b\n"

# Texts are encoded, and tokens copied, by one call each.
WEIGHTS: Weights = {
    (Tokenizer, "encode"): lambda self, text, **_: len(text) // 4,
    (Generation, "__init__"): lambda self, *, request, **_: len(request.prompt_token_ids) // 8,
}


def call(address: str, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """All responses of a call, read in a thread; none if it is refused."""
    options = [("grpc.max_receive_message_length", 64 << 20)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = gateway_pb2_grpc.GenerationServiceStub(channel)
        try:
            return list(stub.Generate(request, timeout=120))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            return []


async def counted_turns(
    running: RunningGateway, function: Callable[[str], Any]
) -> tuple[Turns, Any]:
    address = running.gateway.server.address
    await asyncio.to_thread(call, address, pb.GenerateRequest(text="warm"))
    with counted(weights=WEIGHTS) as turns:
        result = await asyncio.to_thread(function, address)
        await running.until_idle()
    return turns, result


def tokens(num_tokens: int) -> pb.TokenIds:
    return pb.TokenIds(token_ids=[100 + index % 1500 for index in range(num_tokens)])


REQUESTS = {
    "text that fits": lambda: pb.GenerateRequest(text=CODE * 18_000, max_new_tokens=1),
    "many tokens": lambda: pb.GenerateRequest(tokens=tokens(MAX_MODEL_LEN - 1)),
    "many tokens, every choice": lambda: pb.GenerateRequest(tokens=tokens(HALF), n=16),
    "given output": lambda: pb.GenerateRequest(
        text="x", output_token_ids=tokens(HALF).token_ids, n=16
    ),
    "given output, stop strings": lambda: pb.GenerateRequest(
        text="x", output_token_ids=tokens(HALF).token_ids, n=16, stop_sequences=STOPS
    ),
    "logit bias": lambda: pb.GenerateRequest(
        text="x",
        n=16,
        sampling=sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)),
    ),
    "affinity": lambda: pb.GenerateRequest(text="x" * 100_000, affinity_key="k" * 256),
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_the_largest_requests_do_not_block_the_loop(
    start_gateway: StartGateway, kind: str
) -> None:
    request = REQUESTS[kind]()
    assert request.ByteSize() <= MOST_BYTES
    with threaded_verifiers(ThreadedVerifier(), 8) as addresses:
        running = await start_gateway(
            verifiers=addresses, tokenizer=MODEL_FOLDER, draft_wait="never"
        )
        turns, responses = await counted_turns(running, lambda address: call(address, request))
        await running.gateway.stop()
    ends = [response for response in responses if response.WhichOneof("event") == "finished"]
    assert len(ends) == (request.n or 1)
    assert 0 < turns.most < MAX_WORK


def long_output(opened: verifier_pb2.Open) -> Sequence[verifier_pb2.SessionResponse]:
    """8,192 tokens, 32 a step."""
    if opened.max_new_tokens == 1:
        return one_token(opened)
    responses = []
    for done in range(0, 8192, 32):
        token_ids = [100 + (done + index) % 1500 for index in range(32)]
        finish = sampling_pb2.FINISH_REASON_STOP if done == 8192 - 32 else 0
        responses.append(decided(opened, done, token_ids, finish_reason=finish))
    return responses


@pytest.mark.parametrize(
    "fields",
    [{}, {"stop_sequences": STOPS}],
    ids=["text", "stop strings"],
)
async def test_long_outputs_do_not_block_the_loop(
    start_gateway: StartGateway, fields: dict[str, Any]
) -> None:
    request = pb.GenerateRequest(text="x", **{"n": 16, **fields})
    with threaded_verifiers(ThreadedVerifier(long_output), 2) as addresses:
        running = await start_gateway(
            verifiers=addresses, tokenizer=MODEL_FOLDER, draft_wait="never"
        )
        turns, responses = await counted_turns(running, lambda address: call(address, request))
        await running.gateway.stop()
    num_tokens = sum(len(response.chunk.token_ids) for response in responses)
    assert num_tokens == 8192 * request.n
    assert 0 < turns.most < MAX_WORK
