"""Measures some rows in this process, and prints each one's measures.

    python -m benchmarks.gpu.worker --folder FOLDER --device cuda --rows decode verify [--quick]

For `benchmarks.gpu`, which starts another one when this one ends: after some errors of a GPU
nothing more runs in a process. What it prints for it are lines of `MARK` and a JSON object: first
the machine, then for each row a `measure` each, and at its end the `error` that kept it from being
measured whole, or null. In between, `loads` says that it begins to load a model or has ended to.
"""

import argparse
import asyncio
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.rows import ROWS

MARK = "benchmarks.gpu: "


async def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args(argv)

    import torch

    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        for name in arguments.rows:
            _tell({"row": name, "error": "torch sees no GPU here", "is_last": False})
        return

    import transformers

    from benchmarks.gpu.bench import Bench, size_for

    transformers.logging.set_verbosity_error()
    if device.type == "cpu":
        torch.set_num_threads(1)
    _tell({"machine": _machine(device), "transformers": transformers.__version__})
    bench = Bench(
        device=device,
        size=size_for(device, quick=arguments.quick),
        folder=arguments.folder,
        say=lambda line: print(line, file=sys.stderr, flush=True),
        tell_loading=lambda loads: _tell({"loads": loads}),
    )
    for name in arguments.rows:
        plan = ROWS[name]
        bench.deadline_s = time.monotonic() + plan.enough_s
        error_told, is_last = None, False
        try:
            async for measure in plan.load()(bench):
                _tell({"row": name, "measure": asdict(measure)})
            if device.type == "cuda":
                # Here, since a kernel's error may come with it.
                torch.cuda.empty_cache()
        except Exception as error:
            traceback.print_exc()
            # After some errors nothing runs on a GPU, and not all of them have a type of their own.
            is_last = device.type == "cuda"
            error_told = f"{type(error).__name__}: {error}"
        _tell({"row": name, "error": error_told, "is_last": is_last})
        if is_last:
            return


def _machine(device: "torch.device") -> str:  # type: ignore[name-defined]  # noqa: F821
    """The device, and what computes on it."""
    import torch

    from benchmarks.machine import processor

    if device.type == "cpu":
        return f"{processor()}, torch {torch.__version__}"
    found = torch.cuda.get_device_properties(device)
    return (
        f"{found.name}, compute capability {found.major}.{found.minor}, "
        f"{found.total_memory / 1e9:.0f} GB, torch {torch.__version__}, CUDA {torch.version.cuda}; "
        f"{processor()}"
    )


def _tell(what: object) -> None:
    print(f"{MARK}{json.dumps(what)}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
