"""Prints which kernels a warm drafter still compiles, and which take floats as addresses.

    python -m tests.drafter.late_compilations

Kernels belong to the process: one that any other test compiled would count as compiled.
"""

import asyncio
import importlib
import inspect
import pkgutil
import sys
from typing import Any

import structlog
from numba import types

import drafter
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.local_drafter import LocalDrafter


def kernels() -> dict[str, Any]:
    """All kernels by their names."""
    found = {}
    for module in pkgutil.walk_packages(drafter.__path__, "drafter."):
        if module.name != "drafter.__main__":
            for name, value in vars(importlib.import_module(module.name)).items():
                if hasattr(value, "signatures"):
                    found[f"{module.name}.{name}"] = value
                    found[f"{module.name}.{name}, as a part"] = value.part
    return found


def compiled_kernels() -> dict[str, int]:
    """How many versions of each kernel there are in this process."""
    return {name: len(kernel.signatures) for name, kernel in kernels().items()}


def float_parameters() -> list[str]:
    """Kernels' parameters that are floats, but for seconds: an address plus an int64, say."""
    return [
        f"{name}: {parameter}"
        for name, kernel in kernels().items()
        for parameters in [inspect.signature(kernel.py_func).parameters]
        for signature in kernel.nopython_signatures
        for parameter, kind in zip(parameters, signature.args, strict=True)
        if isinstance(kind, types.Float) and not parameter.endswith("_s")
    ]


def params_of(i: int) -> pb.NgramParams:
    params = pb.NgramParams(tie=i % 4, pool_id="pool")  # type: ignore[arg-type]
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
    assert list(local.drafter.pools.texts_of("pool"))
    after = compiled_kernels()
    for name in sorted(after):
        if after[name] != before.get(name):
            print(name)
    for parameter in float_parameters():
        print(parameter)
    await local.engine.indexer.close()


async def exchange_and_settle(local: LocalDrafter, request: pb.ProposeRequest) -> None:
    await local.exchange(request)
    await local.settle()


if __name__ == "__main__":
    # A cold start tells how far it is.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main())
