"""A drafter without a transport."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from drafter.batch.batch import Batch
from drafter.config import DrafterConfig
from drafter.history.history import History
from drafter.server import DrafterServer
from servicekit.logs import get_logger
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.running_drafter import FakeClock, histories_by_id


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
        self.lease = self.drafter.store.start_stream()
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
        batch = Batch(pb.ProposeRequest.FromString(payload), self.lease)
        response = await self.engine.answer(batch)
        self.engine.finish(batch)
        return response

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
