"""How large the house is, and how many flags its services have.

    python -m tests.repository.house

Prints a small table. A test holds the number of flags under 60.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pydantic

from drafter.config import SERVICE as DRAFTER
from drafter.config import DrafterConfig
from gateway.config import SERVICE as GATEWAY
from gateway.config import GatewayConfig
from servicekit.config import list_options
from verifier.config import SERVICE as VERIFIER
from verifier.config import VerifierConfig

REPOSITORY = Path(__file__).parents[2]
CONFIGS: dict[str, type[pydantic.BaseModel]] = {
    DRAFTER: DrafterConfig,
    VERIFIER: VerifierConfig,
    GATEWAY: GatewayConfig,
}
PRODUCT = ("drafter", "verifier", "gateway", "servicekit", "tandem")


def flags() -> set[str]:
    """The distinct flags of all services, `--config` among them."""
    found = {"--config"}
    for service, config in CONFIGS.items():
        found |= {option.flag for option in list_options(config, service=service)}
    return found


def main() -> None:
    product = [path for folder in PRODUCT for path in _files(f"{folder}/*.py")]
    rows = {
        f"lines of {', '.join(PRODUCT)}": _lines(
            path for path in product if "_pb2" not in path.name
        ),
        "lines of benchmarks": _lines(_files("benchmarks/*.py")),
        "lines of tests": _lines(_files("tests/*.py")),
        "words of docs and README": sum(
            len(path.read_text().split()) for path in _files("docs/*.md", "README.md")
        ),
        "flags of all services": len(flags()),
    }
    for service, config in CONFIGS.items():
        rows[f"flags of the {service}"] = 1 + len(list_options(config, service=service))
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}} {value:>8,}")


def _files(*patterns: str) -> list[Path]:
    """The tracked files; `*` matches folders, too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (REPOSITORY / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.exists()]


def _lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


if __name__ == "__main__":
    main()
