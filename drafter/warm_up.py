"""Compiles every kernel, or loads it from disk, by answering batches as a server does.

    python -m drafter.warm_up

compiles them into the folder of the source, for an image or a package: on x86-64 for processors
with AVX2 and for those with AVX-512, whichever this one is.
"""

import asyncio

from drafter.batch.batch import Batch
from drafter.batch.engine import DraftEngine
from drafter.history.pool_drafts import PoolDrafts
from drafter.history.store import HistoryStore, StoreLimits
from drafter.pool_index.records import PoolLimits
from drafter.pools.store import PoolStore
from drafter.refusals import Failure
from servicekit.kernels.jit import without_collections
from servicekit.kernels.ship import compile_for_all_levels
from servicekit.logs import get_logger
from tandem.v1 import drafter_pb2 as pb

_STORE_LIMITS = StoreLimits(
    max_sequences=8, max_sequence_bytes=1 << 20, max_history_bytes=1 << 23, idle_ttl_s=1.0
)
_POOL_LIMITS = PoolLimits(max_pool_bytes=1 << 20, max_pools_bytes=1 << 22, pool_ttl_s=1.0)


def warm_up() -> None:
    """Runs the scenario. May take a minute where nothing was compiled yet; not for an event loop.

    Raises:
        RuntimeError: a kernel failed.
    """
    with without_collections():
        asyncio.run(_answer_batches())


async def _answer_batches() -> None:
    now_s = 0.0
    store = HistoryStore(_STORE_LIMITS, clock=lambda: now_s, on_eviction=lambda reason: None)
    pools = PoolStore(_POOL_LIMITS, clock=lambda: now_s, seed=1)
    engine = DraftEngine(
        store,
        PoolDrafts(pools, on_work=pools.finish),
        logger=get_logger("drafter"),
        on_batch=lambda num_by_outcome, duration_s: None,
        on_failure=_fail,
    )

    async def send(request: pb.ProposeRequest) -> None:
        batch = Batch(request, lease=None)
        await engine.answer(batch)
        engine.finish(batch)
        if engine.indexer.task is not None:
            await engine.indexer.task

    options = {
        "index": pb.NgramParams(tie=pb.TIE_LONGEST, pool_id="pool"),
        "scan": pb.NgramParams(algorithm=pb.ALGORITHM_KMP),
    }
    for _ in range(2):
        # Texts whose tables grow, and that fill several pages of a pool; then a verifier's step.
        for base_length, num_tokens in ((0, 200), (200, 3000), (3200, 40)):
            await send(
                pb.ProposeRequest(
                    sequences=[
                        pb.SequenceDelta(
                            sequence_id=sequence_id,
                            base_length=base_length,
                            token_ids=range(num_tokens),
                            max_draft_tokens=4,
                            params=params if base_length == 0 else None,
                        )
                        for sequence_id, params in options.items()
                    ]
                )
            )
        releases = [pb.Release(sequence_id=name, keep=pb.KEEP_ALL) for name in options]
        await send(pb.ProposeRequest(releases=releases))
    for _ in pools.texts_of("pool"):
        pass  # as a snapshot reads them
    now_s += _POOL_LIMITS.pool_ttl_s
    pools.finish()


def _fail(failure: Failure) -> None:
    raise RuntimeError(f"a kernel failed: {failure.value}")


if __name__ == "__main__":
    compile_for_all_levels(warm_up)
