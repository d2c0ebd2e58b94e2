"""Compiles the drafter's kernels into the folder of its source, for an image or a package.

python -m drafter.compile_kernels
"""

from drafter.batch.warm_up import warm_up


def main() -> None:
    warm_up()


if __name__ == "__main__":
    main()
