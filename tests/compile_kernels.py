"""Compiles the drafter's and the verifier's kernels before several processes need them.

numba keeps what it compiled beside the source, so a second run has nothing to do. It compiles one
function of a process at a time, so each service's kernels have a process of their own.

    python -m tests.compile_kernels
"""

import multiprocessing
from collections.abc import Callable


def compile_verifier() -> None:
    import verifier.warm_up
    from verifier.cpu.weights import WeightType

    for kind in (WeightType.FLOAT32, WeightType.BFLOAT16):
        verifier.warm_up.warm_up(kind, kind)


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
        raise SystemExit("a kernel did not compile")


if __name__ == "__main__":
    main()
