"""Rank 0's side: connects the other ranks, makes them load, sends them every step, ends them.

    connect -> (loads its own part) -> load_others -> begin -> model(...).launch ... -> stop

A step is one message, its layout. Nothing is sent between steps.
"""

import contextlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future

import torch

from servicekit.config import ConfigError
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import StepHandle, StepResult, TargetModel
from verifier.sampling.rejection_sampler import JudgedSequence
from verifier.tensor_parallel.collectives import TorchCollectives
from verifier.tensor_parallel.connection import Connection, Kind
from verifier.tensor_parallel.launch import Launch
from verifier.tensor_parallel.layout_codec import encode
from verifier.tensor_parallel.rendezvous import accept_ranks, torchrun_store
from verifier.tensor_parallel.watch import Watch

# Other ranks end at once; this bounds the wait for one that is stuck.
_STOP_TIMEOUT_S = 5.0


class Leader:
    """One per process; `lost`, `stop` and `fail` are for any thread, all else for one.

    Attributes:
        lost: fails when a rank is lost.
    """

    def __init__(self, launch: Launch) -> None:
        self.size = launch.size
        self._launch = launch
        self._watch = Watch()
        self.lost: Future[None] = self._watch.lost
        self._collectives: TorchCollectives | None = None
        self._connections: dict[int, Connection] = {}
        self._is_ending = False

    def connect(self, *, device: torch.device) -> TorchCollectives:
        """Waits for all ranks.

        Raises:
            ConfigError: a rank did not connect.
            RankLostError: a rank is lost already.
        """
        store = torchrun_store(self._launch)
        self._connections = accept_ranks(
            store,
            self._launch,
            on_lost=self._rank_lost,
            is_ending=lambda: self._is_ending,
        )
        self._collectives = TorchCollectives(store, rank=0, size=self.size, device=device)
        return self._collectives

    def load_others(self, identity: Mapping[str, str]) -> int:
        """Makes the other ranks load, one at a time: a mixture of experts, or a model that is
        converted to another dtype, is whole in memory meanwhile.

        Args:
            identity: what all ranks must have in common, by the flag that decides it.

        Returns:
            The smallest number of K/V blocks that any of them has room for.

        Raises:
            ConfigError: one has loaded something else.
            RankLostError: one is lost, or could not load.
        """
        num_kv_blocks = []
        for rank, connection in self._connections.items():
            connection.send(Kind.LOAD)
            loaded = connection.receive().values
            for flag, value in identity.items():
                other = loaded["identity"][flag]
                if other != value:
                    raise ConfigError(flag, f"rank {rank} has {other}, rank 0 has {value}")
            num_kv_blocks.append(int(loaded["num_kv_blocks"]))
        return min(num_kv_blocks)

    def begin(self, *, num_kv_blocks: int) -> None:
        """Makes the other ranks ready for steps."""
        for connection in self._connections.values():
            connection.send(Kind.BEGIN, num_kv_blocks=num_kv_blocks)

    def model(self, own: TargetModel) -> "ParallelModel":
        """The whole model: rank 0's part and the others'."""
        return ParallelModel(own, list(self._connections.values()), self._watch)

    def stop(self) -> None:
        """Ends the other ranks in order; after the last step."""
        self._is_ending = True
        for connection in self._connections.values():
            connection.stop()
        if self._collectives is not None:
            self._collectives.close()
        for connection in self._connections.values():
            connection.wait_closed(_STOP_TIMEOUT_S)

    def fail(self, error: BaseException) -> None:
        """Ends the other ranks because rank 0 has failed."""
        self._is_ending = True
        self._send_failed(str(error) or type(error).__name__)
        for connection in self._connections.values():
            connection.close()

    def _rank_lost(self, reason: str) -> None:
        self._watch.rank_lost(reason)
        # At once: the remaining ranks fail inside a collective and then look for the reason.
        self._send_failed(reason)

    def _send_failed(self, message: str) -> None:
        for connection in self._connections.values():
            connection.send(Kind.FAILED, message=message)


class ParallelModel:
    """Implements `TargetModel`. Owned by the engine thread."""

    def __init__(self, own: TargetModel, connections: list[Connection], watch: Watch) -> None:
        self.vocab_size = own.vocab_size
        self.computes_at_launch = own.computes_at_launch
        self._own = own
        self._connections = connections
        self._watch = watch

    def launch(self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]) -> StepHandle:
        """All ranks begin; rank 0 alone samples, since each has the logits whole."""
        payload = encode(layout).tobytes()
        for connection in self._connections:
            connection.send(Kind.STEP, payload)
        with _explaining(self._watch):
            return _ParallelStep(self._own.launch(layout, sequences), self._watch)


class _ParallelStep:
    """Implements `StepHandle`: rank 0's, and a lost rank is named."""

    def __init__(self, own: StepHandle, watch: Watch) -> None:
        self._own = own
        self._watch = watch

    def wait(self) -> None:
        with _explaining(self._watch):
            self._own.wait()

    def result(self) -> StepResult:
        with _explaining(self._watch):
            return self._own.result()


@contextlib.contextmanager
def _explaining(watch: Watch) -> Iterator[None]:
    """A collective that fails because a rank is lost raises what says so."""
    try:
        yield
    except RuntimeError as error:
        raise watch.explain(error) from error
