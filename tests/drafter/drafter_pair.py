"""Drafters without a transport, alone or as a pair that gets the same messages from a client."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

import drafter.batch.engine
from drafter.batch.batch import Batch
from drafter.config import DrafterConfig
from drafter.errors import MalformedBatchError
from drafter.history.history import History
from drafter.history.id_table import slots_by_last_use
from drafter.server import DrafterServer
from servicekit.logs import get_logger
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.running_drafter import FakeClock, histories_by_id

OPTIONS = [
    None,
    pb.NgramParams(min_ngram=1, tie=pb.TIE_LATEST),
    pb.NgramParams(tie=pb.TIE_LONGEST, overlap=pb.OVERLAP_ALLOWED),
    pb.NgramParams(algorithm=pb.ALGORITHM_KMP),
    pb.NgramParams(min_ngram=1, max_ngram=3, pool_id="tenant/pool", pool_min_ngram=2),
    pb.NgramParams(tie=pb.TIE_LONGEST, pool_id="tenant/pool"),
    pb.NgramParams(pool_id="other/pool"),
    pb.NgramParams(min_ngram=4, max_ngram=3),
]


class LocalDrafter:
    """A drafter without a transport."""

    def __init__(self, **bounds: int) -> None:
        self.clock = FakeClock()
        self.registry = CollectorRegistry()
        config = DrafterConfig.model_validate({"server": {"listen": "127.0.0.1:0"}, **bounds})
        self.drafter = DrafterServer(
            config, registry=self.registry, logger=get_logger("test"), clock=self.clock
        )
        self.drafter.servicer.open()
        self.engine = self.drafter.servicer.engine
        self.batch = Batch(self.drafter.store, self.drafter.store.start_stream())
        # Pools work only when the test calls `work_on_pools`, and not as time passes.
        self.engine.pools._on_work = lambda: None

    @property
    def histories(self) -> dict[str, History]:
        """All known histories by their sequences' ids."""
        return histories_by_id(self.drafter.store)

    async def exchange(self, payload: bytes | pb.ProposeRequest) -> pb.ProposeResponse:
        """Answers a message as a stream's, and starts the indexer on its texts.

        Raises:
            DecodeError, MalformedBatchError, MessageLimitError: the message is refused.
        """
        if not isinstance(payload, bytes):
            payload = payload.SerializeToString()
        self.batch.scan(payload)
        response = await self.engine.answer(self.batch)
        self.engine.finish(self.batch)
        parsed = pb.ProposeResponse.FromString(response)
        assert parsed.SerializeToString() == response, "not as protobuf writes it"
        return parsed

    async def append(
        self, sequence_id: str, base_length: int, token_ids: Sequence[int]
    ) -> pb.Proposal:
        """Sends one delta; returns its proposal of up to two tokens."""
        delta = pb.SequenceDelta(
            sequence_id=sequence_id,
            base_length=base_length,
            token_ids=token_ids,
            max_draft_tokens=2,
        )
        [proposal] = (await self.exchange(pb.ProposeRequest(sequences=[delta]))).proposals
        return proposal

    async def settle(self) -> None:
        """Returns when the indexer and the pools have no work."""
        if self.engine.indexer.task is not None:
            await self.engine.indexer.task
        self.drafter.pools.finish()

    def num_proposals(self) -> list[float | None]:
        """As the metrics count them, by outcome."""
        return [
            self.registry.get_sample_value(
                "tandem_drafter_proposals_total", {"outcome": outcome, "source": source}
            )
            for outcome, source in (
                ("draft", "sequence"),
                ("draft", "pool"),
                ("indexing", "none"),
                ("no_match", "none"),
                ("appended", "none"),
                ("out_of_sync", "none"),
                ("invalid", "none"),
            )
        ]


class ProtobufDrafter(LocalDrafter):
    """A drafter for which protobuf parses each row, and which answers each row alone."""

    async def exchange(self, payload: bytes | pb.ProposeRequest) -> pb.ProposeResponse:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafter.batch.engine, "append_rows", lambda *a: a[2])
            patch.setattr(drafter.batch.engine, "ROWS_PER_CALL", 1)
            return await super().exchange(payload)


class DrafterPair:
    """Sends every message to a drafter whose kernels append, and to one that parses every row."""

    def __init__(self, seen: Counter[str], **bounds: int) -> None:
        self.by_kernel, self.by_protobuf = LocalDrafter(**bounds), ProtobufDrafter(**bounds)
        self.seen = seen

    async def exchange(self, payload: bytes) -> None:
        """Asserts that both give the same answer, or that both refuse the message."""
        answers: list[pb.ProposeResponse | None] = []
        for local in (self.by_kernel, self.by_protobuf):
            try:
                answers.append(await local.exchange(payload))
            except (DecodeError, MalformedBatchError):
                answers.append(None)
        by_kernel, by_protobuf = answers
        assert by_kernel == by_protobuf
        if by_kernel is None:
            self.seen["refused"] += 1
            return
        has_only_kernel_rows = not self.by_kernel.batch._odd and not self.by_kernel.batch.releases
        if by_kernel.proposals:
            self.seen["kernel rows" if has_only_kernel_rows else "parsed rows"] += 1
        for proposal in by_kernel.proposals:
            self.seen[pb.Status.Name(proposal.status)] += 1
            self.seen[pb.Source.Name(proposal.source)] += has_only_kernel_rows

    async def feed_pool(self, token_ids: list[int]) -> None:
        """Keeps a text in a pool, so that drafts can come from it."""
        fed = pb.SequenceDelta(sequence_id="fed", token_ids=token_ids, params=OPTIONS[4])
        await self.exchange(pb.ProposeRequest(sequences=[fed]).SerializeToString())
        release = pb.Release(sequence_id="fed", keep=pb.KEEP_ALL)
        await self.exchange(pb.ProposeRequest(releases=[release]).SerializeToString())
        await self.settle()

    async def settle(self) -> None:
        for local in (self.by_kernel, self.by_protobuf):
            await local.settle()

    def work_on_pools(self, num_pieces: int) -> None:
        """Does some pieces of the pools' work."""
        for local in (self.by_kernel, self.by_protobuf):
            for _ in range(num_pieces):
                local.drafter.pools.work()

    def pass_time(self, seconds: float) -> None:
        for local in (self.by_kernel, self.by_protobuf):
            local.clock.now_s += seconds

    async def check_same_state(self) -> None:
        await self.settle()
        one, other = self.by_kernel.drafter.store, self.by_protobuf.drafter.store
        one.check_integrity()
        other.check_integrity()
        order = [
            [store.by_slot[slot] for slot in slots_by_last_use(store.table)]
            for store in (one, other)
        ]
        for mine, theirs in zip(*order, strict=True):
            assert mine is not None
            assert theirs is not None
            assert mine.sequence_id == theirs.sequence_id, "not the same order of use"
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert self.by_kernel.num_proposals() == self.by_protobuf.num_proposals()


class Client:
    """Makes requests as a gateway sends them, and now and then invalid ones."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.texts: dict[str, list[int]] = {}
        self.num_created = 0

    def words(self, num_tokens: int) -> list[int]:
        """Runs of a few tokens that repeat."""
        written = random.Random(self.rng.randrange(50))
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            first = written.choice([0, 50, 100_000, 2**32 - 20])
            tokens += range(first, first + written.randrange(1, 9))
        return tokens[:num_tokens]

    def delta(self, sequence_id: str, *, is_usual: bool) -> pb.SequenceDelta:
        rng = self.rng
        text = self.texts[sequence_id]
        new = self.words(rng.choice([3, 8, 9, 0, 1] if is_usual else [3, 30, 130, 300]))
        base = len(text)
        kind = 0 if is_usual else rng.randrange(20)
        if kind == 1:
            base += 1  # a gap
        elif kind in (2, 3) and len(text) > 5:
            base -= rng.randrange(5)  # an overlap that agrees
            new = text[base:] + new
        elif kind == 4 and base > 0:
            base -= 1
            new = [text[-1] ^ 1, *new]  # an overlap that differs
        delta = pb.SequenceDelta(
            sequence_id=sequence_id,
            base_length=base,
            token_ids=new,
            max_draft_tokens=rng.choice([24, 8, 1, 0, 2**32 - 1]),
            max_length=rng.choice([0, 0, len(text) + 4, 1]),
            prompt_length=rng.choice([0, 0, 7]),
            params=rng.choice(OPTIONS) if kind == 5 else None,
        )
        if base == len(text) or (base < len(text) and text[base:] == new[: len(text) - base]):
            self.texts[sequence_id] = text[:base] + new if base + len(new) > len(text) else text
        return delta

    def create(self) -> pb.SequenceDelta:
        self.num_created += 1
        sequence_id = f"{self.num_created:0{self.rng.choice([32, 5, 64])}}"
        text = self.words(self.rng.choice([40, 2, 250, 400, 1500]))
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
        request = pb.ProposeRequest(batch_id=rng.choice([7, 0, 2**32, 2**64 - 1]))
        known = list(self.texts)
        rng.shuffle(known)
        kind = rng.randrange(14)
        is_usual = kind > 3
        if known and kind in (0, 1):
            released = known.pop()
            del self.texts[released]
            request.releases.add(
                sequence_id=released, keep=rng.choice([pb.KEEP_ALL, pb.KEEP_NOTHING])
            )
        known = known[: rng.randrange(8)]
        deltas = [self.delta(sequence_id, is_usual=is_usual) for sequence_id in known]
        if kind in (1, 2) or not self.texts:
            deltas += [self.create() for _ in range(rng.randrange(1, 5))]
        if kind == 3:
            deltas.append(pb.SequenceDelta(sequence_id="unknown", base_length=4, token_ids=[1]))
        rng.shuffle(deltas)
        request.sequences.extend(deltas)
        return request
