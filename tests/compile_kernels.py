"""Compiles the drafter's and the verifier's kernels, and checks the bundled model against
transformers, before several processes need it.

numba keeps what it compiled beside the source, and a verifier its verdicts, so a second run has
nothing to do. numba compiles one function of a process at a time, so each service's kernels have a
process of their own.

    python -m tests.compile_kernels
"""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

MODEL_FOLDER = Path(__file__).parents[1] / "examples/demo_model/model"


def compile_verifier() -> None:
    import verifier.warm_up
    from servicekit.logs import configure_logs
    from verifier.build import load_model
    from verifier.checkpoint.weight_types import WeightType
    from verifier.config import VerifierConfig

    configure_logs("warning", "tests")
    for kind in (WeightType.FLOAT32, WeightType.BFLOAT16):
        verifier.warm_up.warm_up(kind, kind)
        config = {"model": MODEL_FOLDER, "device": "cpu", "threads": 1, "num_kv_blocks": 16}
        load_model(VerifierConfig.model_validate({**config, "dtype": kind.name.lower()}))


def compile_drafter() -> None:
    import drafter.warm_up

    drafter.warm_up.warm_up()


def main() -> None:
    services: list[Callable[[], None]] = [compile_verifier, compile_drafter]
    processes = [multiprocessing.get_context("spawn").Process(target=each) for each in services]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a kernel did not compile, or the model was refused")


if __name__ == "__main__":
    main()
