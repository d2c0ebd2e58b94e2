"""Batches on a stream, taken by kernels, against the same as unary calls, taken message by message.

Two drafters are told the same: whatever is sent, they must answer the same and know the same.
"""

import importlib
import pkgutil
import random

import grpc
import pytest

import drafter
from drafter.sequence_table import slots_in_order
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.running_drafter import RunningDrafter, StartDrafter, ask

STREAM = "/tandem.v1.DrafterService/ProposeStream"
UNARY = "/tandem.v1.DrafterService/Propose"
Call = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
Stream = grpc.aio.StreamStreamCall[bytes, bytes]

OPTIONS = [
    None,
    pb.NgramParams(min_ngram=1, tie=pb.TIE_LATEST),
    pb.NgramParams(tie=pb.TIE_LONGEST, chained=True, overlap=pb.OVERLAP_ALLOWED),
    pb.NgramParams(algorithm=pb.ALGORITHM_KMP),
    pb.NgramParams(min_ngram=1, max_ngram=3, pool_id="tenant/pool", pool_min_ngram=2),
    pb.NgramParams(min_ngram=4, max_ngram=3),
]


class TwoDrafters:
    """The same asked of one by a stream, and of the other by unary calls."""

    def __init__(self, streamed: RunningDrafter, unary: RunningDrafter) -> None:
        self.streamed, self.unary = streamed, unary
        self.stream: Stream = self._open()
        self.call: Call = unary.channel.unary_unary(UNARY)

    def _open(self) -> Stream:
        stream: Stream = self.streamed.channel.stream_stream(STREAM)()
        self.streamed.streams.append(stream)
        return stream

    async def ask(self, payload: bytes, *, elsewhere: bool = False) -> pb.ProposeResponse | None:
        """Asserts that both answer the same; None: both refuse the message.

        Args:
            payload: the message.
            elsewhere: on a stream of its own, for what may end it.
        """
        by_call, by_stream = b"", b""
        refused_call, refused_stream = None, None
        try:
            by_call = await self.call(payload)
        except grpc.aio.AioRpcError as error:
            refused_call = error.code(), error.details()
        stream = self._open() if elsewhere else self.stream
        try:
            await stream.write(payload)
            answer = await stream.read()
            assert isinstance(answer, bytes), "the stream has ended"
            by_stream = answer
        except grpc.aio.AioRpcError as error:
            # What cannot be read names the method; all else the field, in the same words.
            words = (error.details() or "").replace("ProposeStream", "Propose")
            refused_stream = error.code(), words
        assert refused_stream == refused_call
        assert by_stream == by_call, "not the same bytes"
        return None if refused_call else pb.ProposeResponse.FromString(by_call)

    async def know_the_same(self) -> None:
        # A stream's batch is read when what the one before brought is indexed.
        await self.ask(b"")
        for running in (self.streamed, self.unary):
            await running.indexed()
        one, other = self.streamed.drafter.store, self.unary.drafter.store
        one.check_integrity()
        other.check_integrity()
        assert one.history_bytes == other.history_bytes
        order = [
            [store.by_slot[slot] for slot in slots_in_order(store.table)] for store in (one, other)
        ]
        for mine, theirs in zip(*order, strict=True):
            assert mine is not None
            assert theirs is not None
            assert mine.sequence_id == theirs.sequence_id, "not the same order of use"
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        for labels in (
            ("draft", "sequence"),
            ("draft", "pool"),
            ("no_match", "none"),
            ("appended", "none"),
            ("out_of_sync", "none"),
            ("invalid", "none"),
        ):
            names = dict(zip(("outcome", "source"), labels, strict=True))
            name = "tandem_drafter_proposals_total"
            assert self.streamed.sample(name, **names) == self.unary.sample(name, **names)


class Client:
    """Sends what a gateway might, and now and then what none would."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.texts: dict[str, list[int]] = {}
        self.num_created = 0

    def words(self, most: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < most:
            first = self.rng.choice([0, 50, 100_000, 2**32 - 20])
            tokens += range(first, first + self.rng.randrange(1, 9))
        return tokens[: self.rng.randrange(most + 1)]

    def delta(self, sequence_id: str) -> pb.SequenceDelta:
        rng = self.rng
        text = self.texts[sequence_id]
        new = self.words(rng.choice([0, 3, 9, 9, 9, 30, 300]))
        base = len(text)
        kind = rng.random()
        if kind < 0.04:
            base += 1  # a gap
        elif kind < 0.1 and len(text) > 5:
            base -= rng.randrange(5)  # an overlap, which agrees
            new = text[base:] + new
        elif kind < 0.12 and base > 0:
            base -= 1
            new = [text[-1] ^ 1, *new]  # one that does not
        delta = pb.SequenceDelta(
            sequence_id=sequence_id,
            base_length=base,
            token_ids=new,
            max_draft_tokens=rng.choice([0, 1, 8, 24, 24, 2**32 - 1]),
            max_length=rng.choice([0, 0, len(text) + 4, 1]),
            prompt_length=rng.choice([0, 0, 7]),
            params=rng.choice(OPTIONS) if kind > 0.97 else None,
        )
        if base == len(text) or (base < len(text) and text[base:] == new[: len(text) - base]):
            self.texts[sequence_id] = text[:base] + new if base + len(new) > len(text) else text
        return delta

    def create(self) -> pb.SequenceDelta:
        self.num_created += 1
        sequence_id = f"{self.rng.getrandbits(128):032x}"[: self.rng.choice([32, 32, 5])] + str(
            self.num_created
        )
        text = self.words(self.rng.choice([2, 40, 400, 1500]))
        params = self.rng.choice(OPTIONS)
        if params is not OPTIONS[-1]:
            self.texts[sequence_id] = text
        return pb.SequenceDelta(
            sequence_id=sequence_id,
            token_ids=text,
            max_draft_tokens=self.rng.choice([0, 8]),
            params=params,
        )

    def request(self) -> pb.ProposeRequest:
        rng = self.rng
        request = pb.ProposeRequest(batch_id=rng.choice([0, 7, 2**32, 2**64 - 1]))
        known = list(self.texts)
        rng.shuffle(known)
        if known and rng.random() < 0.2:
            gone = known.pop()
            del self.texts[gone]
            request.releases.add(sequence_id=gone, keep=rng.choice([pb.KEEP_NOTHING, pb.KEEP_ALL]))
        deltas = [self.delta(sequence_id) for sequence_id in known[: rng.randrange(14)]]
        deltas += [self.create() for _ in range(rng.choice([0, 0, 1, 3]))]
        if rng.random() < 0.1:
            deltas.append(pb.SequenceDelta(sequence_id="unknown", base_length=4, token_ids=[1]))
        rng.shuffle(deltas)
        request.sequences.extend(deltas)
        return request


@pytest.mark.parametrize("bounds", [{}, {"max_sequences": 9, "max_sequence_bytes": 40_000}])
async def test_a_stream_answers_byte_for_byte_as_unary_calls_do(
    start_drafter: StartDrafter, bounds: dict[str, int]
) -> None:
    two = TwoDrafters(await start_drafter(**bounds), await start_drafter(**bounds))
    rng = random.Random(str(bounds))
    client = Client(rng)
    statuses: dict[int, int] = {}
    num_sources = [0, 0, 0]
    num_malformed = 0
    for step in range(600):
        payload = client.request().SerializeToString()
        if rng.random() < 0.06:
            damaged = bytearray(payload)
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(len(damaged) + 1)
                damaged[at : at + 1] = [rng.randrange(256)]
            num_malformed += await two.ask(bytes(damaged), elsewhere=True) is None
            continue
        answer = await two.ask(payload)
        assert answer is not None
        for proposal in answer.proposals:
            statuses[proposal.status] = statuses.get(proposal.status, 0) + 1
            num_sources[proposal.source] += 1
        for running in (two.streamed, two.unary):
            running.clock.now_s += 0.25
            running.drafter.pools.finish()
        if step % 20 == 0:
            await two.know_the_same()
    await two.know_the_same()
    assert min(statuses.get(status, 0) for status in (1, 2, 3, 4)) > 20, statuses
    assert num_sources[pb.SOURCE_SEQUENCE] > 200
    assert num_sources[pb.SOURCE_POOL] > 5
    assert num_malformed > 5


async def test_what_is_no_request_is_refused_whole(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    good = pb.ProposeRequest(sequences=[pb.SequenceDelta(sequence_id="a", token_ids=[1])])
    for broken in (b"\xff", good.SerializeToString() + b"\x12\x7f", b"\x12\x03\x0a\x01\xff"):
        stream: Stream = running.channel.stream_stream(STREAM)()
        running.streams.append(stream)
        await stream.write(good.SerializeToString() + broken)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await running.load()).num_sequences == 0


async def test_a_stream_is_answered_by_kernels(start_drafter: StartDrafter) -> None:
    """Else the two would be the same way."""
    running = await start_drafter()
    stream: Stream = running.channel.stream_stream(STREAM)()
    running.streams.append(stream)
    names = [f"{i:032x}" for i in range(40)]

    async def ask(base: int) -> pb.ProposeResponse:
        request = pb.ProposeRequest(
            sequences=[
                pb.SequenceDelta(
                    sequence_id=name, base_length=base, token_ids=[1, 2], max_draft_tokens=4
                )
                for name in names
            ]
        )
        await stream.write(request.SerializeToString())
        answer = await stream.read()
        assert isinstance(answer, bytes)
        return pb.ProposeResponse.FromString(answer)

    await ask(0)
    num_objects = 0
    append = running.drafter.store.append

    def count(*arguments: object) -> object:
        nonlocal num_objects
        num_objects += 1
        return append(*arguments)  # type: ignore[arg-type]

    running.drafter.store.append = count  # type: ignore[method-assign,assignment]
    for step in range(1, 10):
        response = await ask(2 * step)
        assert [p.base_length for p in response.proposals] == [2 * step + 2] * 40
    assert num_objects == 0


def compiled_kernels() -> dict[str, int]:
    """How many versions of each kernel there are in this process."""
    found = {}
    for module in pkgutil.iter_modules(drafter.__path__):
        if module.name != "__main__":
            for name, value in vars(importlib.import_module(f"drafter.{module.name}")).items():
                if hasattr(value, "signatures"):
                    found[f"{module.name}.{name}"] = len(value.signatures)
    return found


async def test_a_warm_drafter_has_nothing_left_to_compile(start_drafter: StartDrafter) -> None:
    """It would stand still for seconds, with everybody waiting."""
    running = await start_drafter()
    stream = running.open_stream()
    before = compiled_kernels()
    for step in range(30):
        new = [1, 2, 3, 2**32 - 1 - step % 7]
        request = pb.ProposeRequest(
            sequences=[
                pb.SequenceDelta(
                    sequence_id=f"{i}",
                    base_length=4 * step if i else 9,
                    token_ids=new,
                    max_draft_tokens=8,
                    params=pb.NgramParams(tie=i % 4, pool_id="pool"),  # type: ignore[arg-type]
                )
                for i in range(6)
            ],
            releases=[pb.Release(sequence_id=f"{step - 10}", keep=pb.KEEP_ALL)],
        )
        await ask(stream, request)
        running.drafter.pools.finish()
    assert compiled_kernels() == before
