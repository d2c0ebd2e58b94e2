"""The event loop stays responsive: no message from or to a client blocks it for long.

What counts is the work of the loop alone: engine and client run in threads of their own. The model
is a stand-in that always continues with token 0.
"""

import asyncio
import collections
import concurrent.futures
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
from prometheus_client import CollectorRegistry

from servicekit.config import ServerOptions
from tandem.v1 import sampling_pb2
from tandem.v1 import verifier_pb2 as pb
from tandem.v1 import verifier_pb2_grpc as rpc
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.running_verifier import PATIENCE_S
from tests.work import MAX_WORK, Weights, counted
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.host_step import SampledOnHost
from verifier.batch.target_model import FloatArray
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.server import VerifierServer
from verifier.service import command_wire
from verifier.service.served_model import ServedModel

pytestmark = pytest.mark.stand_in

MAX_MODEL_LEN = 1 << 17
# Large ids take three bytes on the wire, and more time to parse.
VOCAB_SIZE = 1 << 15
LARGE_ID = VOCAB_SIZE - 1
# The limits of a message.
MAX_COMMANDS = 16_384
MAX_DRAFT_TOKENS = 8_192
MAX_BYTES = 4 << 20

# Tokens are copied by few calls.
WEIGHTS: Weights = {
    (command_wire, "hint"): lambda draft, served: len(draft.token_ids) // 8,
    (command_wire, "open_sequence"): lambda opened, served, **_: len(opened.token_ids) // 8,
}


class ZeroModel(SampledOnHost):
    """Implements `TargetModel`: all tokens are equally likely, and the lowest id wins."""

    vocab_size = VOCAB_SIZE

    def forward(self, layout: BatchLayout) -> FloatArray:
        return np.zeros((layout.num_rows, VOCAB_SIZE), dtype=np.float32)


def load(config: VerifierConfig) -> LoadedModel:
    num_kv_blocks = 16_384
    served = ServedModel(
        model_id="zero", model_digest="", numerics_digest="", instance_id="", architecture="",
        dtype="float32", device="cpu", numerics="fast", attention_backend="none",
        max_model_len=MAX_MODEL_LEN, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, max_num_speculative_tokens=31,
        vocab_size=VOCAB_SIZE, block_size=16, num_kv_blocks=num_kv_blocks,
        eos_token_ids=frozenset(),
    )  # fmt: skip
    return LoadedModel(model=ZeroModel(), served=served)


@dataclass
class ThreadedClient:
    """A session in its own thread; its messages are serialized beforehand."""

    stub: "rpc.VerifierServiceStub"
    # `stub.Session` for serialized requests.
    start_session: Callable[..., Any]
    events: list[pb.Event] = field(default_factory=list)
    # Counted as they come: a client that counts again and again falls behind.
    _kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    _num_ended: int = 0

    def session(self, steps: list[tuple[list[bytes], Callable[["ThreadedClient"], bool]]]) -> None:
        """Sends each step's messages and reads until its condition holds; then ends the stream."""
        requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        responses = self.start_session(iter(requests.get, None), timeout=PATIENCE_S)
        requests.put(HELLO)
        next(responses)
        # Read by a thread of their own: a client that counts between two reads falls behind, and
        # the verifier ends its session.
        read: queue.SimpleQueue[pb.SessionResponse | None] = queue.SimpleQueue()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(_read_all, responses, read)
            for messages, is_done in steps:
                for message in messages:
                    requests.put(message)
                while not is_done(self):
                    response = read.get()
                    if response is None:
                        reading.result()
                        raise AssertionError("the stream has ended")
                    self._add(response.events)
            requests.put(None)
            reading.result()

    def count(self, kind: str) -> int:
        return self._kinds[kind]

    def num_ended(self) -> int:
        return self._num_ended

    def _add(self, events: Sequence[pb.Event]) -> None:
        self.events += events
        self._kinds.update(str(event.WhichOneof("event")) for event in events)
        self._num_ended += sum(
            event.HasField("rejected") or bool(event.decided.finish_reason) for event in events
        )


def _read_all(
    responses: Iterable[pb.SessionResponse], read: "queue.SimpleQueue[pb.SessionResponse | None]"
) -> None:
    """Puts all responses into `read`, and None when they end, by an error or not."""
    try:
        for response in responses:
            read.put(response)
    finally:
        read.put(None)


def message(*commands: pb.Command) -> bytes:
    serialized = pb.SessionRequest(commands=commands).SerializeToString()
    assert len(serialized) <= MAX_BYTES
    return serialized


def open_command(index: int, num_tokens: int, **fields: object) -> pb.Command:
    sampling = fields.pop("sampling", None)
    return pb.Command(
        open=pb.Open(
            sequence_id=f"{index:032d}",
            token_ids=[LARGE_ID] * num_tokens,
            sampling=sampling,  # type: ignore[arg-type]
            **fields,  # type: ignore[arg-type]
        )
    )


def draft_command(index: int, base_length: int, token_ids: list[int]) -> pb.Command:
    draft = pb.Draft(sequence_id=f"{index:032d}", base_length=base_length, token_ids=token_ids)
    return pb.Command(draft=draft)


def close_command(index: int) -> pb.Command:
    return pb.Command(close=pb.Close(sequence_id=f"{index:032d}"))


HELLO = message(pb.Command(hello=pb.Hello(protocol_version=1)))


@pytest.fixture
async def client() -> AsyncIterator[ThreadedClient]:
    """A client of a verifier in this event loop."""
    verifier = VerifierServer(
        VerifierConfig(server=ServerOptions(listen="127.0.0.1:0"), model=MODEL_FOLDER),
        registry=CollectorRegistry(),
        logger=structlog.get_logger(),
    )
    engine = await verifier.start(load)
    channel = grpc.insecure_channel(verifier.server.address)
    stub = rpc.VerifierServiceStub(channel)
    start_session: Any = channel.stream_stream(
        "/tandem.v1.VerifierService/Session", response_deserializer=pb.SessionResponse.FromString
    )
    yield ThreadedClient(stub, start_session)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wrap_future(engine.when_idle())
        engine.stop()
        await asyncio.wrap_future(engine.stopped)
    channel.close()
    await verifier.server.stop(0)


async def check(call: Callable[[], None]) -> None:
    """Fails if a turn of the loop does too much while the client calls."""
    with counted(weights=WEIGHTS) as turns:
        await asyncio.to_thread(call)
    assert 0 < turns.most < MAX_WORK


async def test_the_longest_prompt(client: ThreadedClient) -> None:
    opens = message(open_command(0, MAX_MODEL_LEN - 1, max_new_tokens=1))
    await check(lambda: client.session([([opens], lambda c: c.num_ended() == 1)]))
    assert client.count("decided") == 1


async def test_a_message_full_of_opens(client: ThreadedClient) -> None:
    """The queue has room for few of them."""
    opens = message(*(open_command(i, 40) for i in range(MAX_COMMANDS)))
    await check(lambda: client.session([([opens], lambda c: c.count("rejected") > 15_000)]))


@pytest.mark.parametrize(
    ("num_drafts", "num_tokens"), [(MAX_COMMANDS, 64), (160, MAX_DRAFT_TOKENS)]
)
async def test_a_message_full_of_drafts(
    client: ThreadedClient, num_drafts: int, num_tokens: int
) -> None:
    token_ids = [LARGE_ID] * num_tokens
    drafts = message(*(draft_command(i, 5, token_ids) for i in range(num_drafts)))
    opens = message(open_command(0, 5, max_new_tokens=40))
    await check(lambda: client.session([([drafts, opens, drafts], lambda c: c.num_ended() == 1)]))


async def test_steps_with_the_most_logprobs(client: ThreadedClient) -> None:
    """64 sequences, each with 7 drafts accepted, and 20 likeliest tokens for each."""
    sampling = sampling_pb2.SamplingParams(logprobs=20)
    options: dict[str, Any] = {"sampling": sampling, "draft_wait": pb.DRAFT_WAIT_ALWAYS}
    opens = message(*(open_command(i, 5, max_new_tokens=9, **options) for i in range(64)))
    hints = message(*(draft_command(i, 6, [0] * 60) for i in range(64)))
    await check(
        lambda: client.session(
            [
                ([opens], lambda c: c.count("decided") == 64),
                ([hints], lambda c: c.num_ended() == 64),
            ]
        ),
    )
    most = max(len(event.decided.token_ids) for event in client.events)
    assert most >= 7, "no drafts were accepted"


async def test_closing_all_of_a_thousand_sequences(client: ThreadedClient) -> None:
    opens = message(*(open_command(i, 40) for i in range(1000)))
    closes = message(*(close_command(i) for i in range(1000)))
    await check(
        lambda: client.session(
            [
                ([opens], lambda c: c.count("decided") > 64),
                ([closes], lambda c: c.num_ended() == 1000),
            ]
        ),
    )


@pytest.mark.parametrize(
    ("num_sequences", "num_tokens", "num_drafts", "top_logprobs"),
    [
        pytest.param(256, 511, 1, 0, id="tokens"),
        pytest.param(8, 10, 180, 20, id="logprobs"),
    ],
)
async def test_the_largest_score_calls(
    client: ThreadedClient, num_sequences: int, num_tokens: int, num_drafts: int, top_logprobs: int
) -> None:
    sequence = pb.ScoreSequence(
        token_ids=[LARGE_ID] * num_tokens, draft_token_ids=[LARGE_ID] * num_drafts
    )
    request = pb.ScoreRequest(sequences=[sequence] * num_sequences, top_logprobs=top_logprobs)

    def score() -> None:
        response = client.stub.Score(request, timeout=PATIENCE_S)
        assert len(response.sequences) == num_sequences

    await check(score)
