"""Measures some rows in this process, and prints each one's measures.

    python -m benchmarks.gpu.worker --folder FOLDER --device cuda --rows decode verify [--quick]

For `benchmarks.gpu`, which starts another one when this one ends: after some errors of a GPU
nothing more runs in a process. What it prints for it are lines of `MARK` and a JSON object: first
the machine, then each row's `measures`, or the `error` that kept it from being measured.
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
    import transformers

    from benchmarks.gpu.bench import Bench, size_for

    transformers.logging.set_verbosity_error()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    _tell({"machine": _machine(device), "transformers": transformers.__version__})
    bench = Bench(
        device=device,
        size=size_for(device, quick=arguments.quick),
        folder=arguments.folder,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    for name in arguments.rows:
        plan = ROWS[name]
        bench.deadline_s = time.monotonic() + plan.enough_s
        try:
            measures = await plan.load()(bench)
        except Exception as error:
            traceback.print_exc()
            # Nothing runs on the device after such an error.
            is_last = isinstance(error, torch.AcceleratorError)
            _tell({"row": name, "error": f"{type(error).__name__}: {error}", "is_last": is_last})
            if is_last:
                return
        else:
            _tell({"row": name, "measures": [asdict(measure) for measure in measures]})
        if device.type == "cuda":
            torch.cuda.empty_cache()


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
