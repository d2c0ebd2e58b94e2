"""Compiles the drafter's and the verifier's kernels before several processes need them.

numba keeps what it compiled beside the source, so a second run has nothing to do.

    python -m tests.compile_kernels
"""

import drafter.warm_up
import verifier.warm_up
from verifier.cpu.weights import WeightType


def main() -> None:
    for kind in (WeightType.FLOAT32, WeightType.BFLOAT16):
        verifier.warm_up.warm_up(kind, kind)
    drafter.warm_up.warm_up()


if __name__ == "__main__":
    main()
