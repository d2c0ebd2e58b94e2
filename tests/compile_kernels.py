"""Compiles the drafter's and the verifier's kernels before several processes need them.

numba keeps what it compiled beside the source, so a second run has nothing to do.

    python -m tests.compile_kernels
"""

import drafter.warm_up
import verifier.sampling.warm_up


def main() -> None:
    verifier.sampling.warm_up.warm_up()
    drafter.warm_up.warm_up()


if __name__ == "__main__":
    main()
