"""Compiles the drafter's and the verifier's kernels before several processes need them.

numba keeps what it compiled beside the source, so a second run has nothing to do.

    python -m tests.compile_kernels
"""

import numpy as np

import drafter.warm_up
from verifier.sampling.philox import Purpose, exponential_noise, uniforms


def main() -> None:
    seeds, positions = np.zeros(1, np.uint64), np.zeros(1, np.int64)
    uniforms(seeds, positions, positions, Purpose.MATCH)
    exponential_noise(seeds, positions, np.ones((1, 1), np.bool_))
    drafter.warm_up.warm_up()


if __name__ == "__main__":
    main()
