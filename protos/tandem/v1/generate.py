"""Generates the Python stubs of `protos/` into `tandem/v1/`; `--check` only compares.

The stubs are committed, so that installing Tandem needs no compiler. They are made with
grpcio-tools 1.81.1 on purpose: its output loads on protobuf 6.33 and 7, later ones refuse 6,
which GPU images often carry.
"""

import argparse
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

GRPC_TOOLS_VERSION = "1.81.1"
REPOSITORY = Path(__file__).resolve().parents[3]
PROTO_ROOT = REPOSITORY / "protos"
PACKAGE = Path("tandem/v1")
# google/protobuf/descriptor.proto, which our own options extend.
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"
GENERATED_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if the committed stubs differ")
    arguments = parser.parse_args()
    version = importlib.metadata.version("grpcio-tools")
    if version != GRPC_TOOLS_VERSION:
        print(
            f"grpcio-tools {GRPC_TOOLS_VERSION} is needed, {version} is installed", file=sys.stderr
        )
        return 1
    if not arguments.check:
        generate(REPOSITORY)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        differing = sorted(differences(Path(folder) / PACKAGE, REPOSITORY / PACKAGE))
    for name in differing:
        print(f"{PACKAGE / name} is not what `make protos` generates", file=sys.stderr)
    return 1 if differing else 0


def generate(destination: Path) -> None:
    """Writes the stubs below `destination`/tandem/v1."""
    (destination / PACKAGE).mkdir(parents=True, exist_ok=True)
    # protoc looks for its mypy plugins on PATH; they lie beside the interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    sources = sorted(str(path) for path in (PROTO_ROOT / PACKAGE).glob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTO_ROOT}",
            f"--proto_path={WELL_KNOWN}",
            f"--python_out={destination}",
            f"--mypy_out=quiet:{destination}",
            f"--grpc_python_out={destination}",
            f"--mypy_grpc_out=quiet:{destination}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")


def differences(made: Path, committed: Path) -> Iterator[str]:
    """Names of the generated files that differ, or that only one side has."""
    names = {
        path.name
        for root in (made, committed)
        for pattern in GENERATED_PATTERNS
        for path in root.glob(pattern)
    }
    for name in names:
        ours, theirs = made / name, committed / name
        if not (ours.exists() and theirs.exists() and ours.read_bytes() == theirs.read_bytes()):
            yield name


if __name__ == "__main__":
    sys.exit(main())
