"""Prints the kernels that a warm drafter still compiles when it serves; a process of its own.

    python -m tests.drafter.late_compilations

Kernels belong to the process: one that any other test compiled would count as compiled.
"""

import asyncio
import importlib
import pkgutil

import drafter
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.drafter_pair import LocalDrafter


def compiled_kernels() -> dict[str, int]:
    """How many versions of each kernel there are in this process."""
    found = {}
    for module in pkgutil.walk_packages(drafter.__path__, "drafter."):
        if module.name != "drafter.__main__":
            for name, value in vars(importlib.import_module(module.name)).items():
                if hasattr(value, "signatures"):
                    found[f"{module.name}.{name}"] = len(value.signatures)
    return found


def params_of(i: int) -> pb.NgramParams:
    params = pb.NgramParams(tie=i % 4, pool_id="pool", chained=i > 5)  # type: ignore[arg-type]
    params.pool_feed_tokens = 16 * (i % 2)
    if i % 3 == 2:
        params.algorithm = pb.ALGORITHM_KMP
    return params


async def main() -> None:
    local = LocalDrafter()
    await local.drafter.warm_up()
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
                    params=params_of(i),
                )
                for i in range(12)
            ],
            releases=[pb.Release(sequence_id=f"{step - 10}", keep=pb.KEEP_ALL)],
        )
        if step == 20:
            # A text whose scan takes several calls, and one whose tables grow.
            for base_length in range(0, 200_000, 8000):
                for sequence_id in ("2", "3"):
                    long = pb.SequenceDelta(
                        sequence_id=f"long {sequence_id}",
                        base_length=base_length,
                        token_ids=range(8000),
                        max_draft_tokens=2,
                        params=params_of(int(sequence_id)),
                    )
                    await exchange_and_settle(local, pb.ProposeRequest(sequences=[long]))
        await exchange_and_settle(local, request)
        local.drafter.pools.finish()
    after = compiled_kernels()
    for name in sorted(after):
        if after[name] != before.get(name):
            print(name)
    await local.engine.indexer.close()


async def exchange_and_settle(local: LocalDrafter, request: pb.ProposeRequest) -> None:
    await local.exchange(request)
    await local.settle()


if __name__ == "__main__":
    asyncio.run(main())
