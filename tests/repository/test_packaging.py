"""Requirements, pins, and the extras of each service."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from servicekit import VERSION

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
CONSTRAINTS = [
    line
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
PINS: dict[str, Version] = {
    canonicalize_name(name): Version(version)
    for name, _, version in (line.partition("==") for line in CONSTRAINTS)
}


def requirements(*extras: str) -> Iterator[Requirement]:
    """The requirements of the core and these extras, following Tandem's own extras."""
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        texts += EXTRAS[extra]
    for text in texts:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            yield from requirements(*requirement.extras)
        else:
            yield requirement


def names(*extras: str) -> set[str]:
    """Names as on an index: lower case, with hyphens."""
    return {canonicalize_name(requirement.name) for requirement in requirements(*extras)}


def test_a_service_installs_only_its_own_packages() -> None:
    assert names("verifier") >= {"torch", "transformers", "safetensors", "numba"}
    for extra in ("drafter", "gateway"):
        assert not names(extra) & {"torch", "transformers", "safetensors"}
    assert "numba" in names("drafter")
    assert "numba" not in names("gateway")
    assert names("gateway") == names("servicekit") | {
        "jinja2",
        "numpy",
        "starlette",
        "tokenizers",
        "uvicorn",
    }
    assert not names() & {"torch", "transformers", "numba", "pydantic"}


# Imports a service where some packages are as if they were not installed.
_IMPORT = """
import importlib, sys
service, *hidden = sys.argv[1:]
sys.modules.update(dict.fromkeys(hidden))
importlib.import_module(service + ".__main__")
importlib.import_module(service + ".server")
"""


@pytest.mark.parametrize("service", ["drafter", "gateway", "verifier"])
def test_a_service_starts_with_what_its_extra_installs(service: str) -> None:
    installed = installed_with(names(service)) | {PROJECT["name"]}
    hidden = [
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if not {canonicalize_name(package) for package in packages} & installed
    ]
    assert {"pytest", "openai"} <= set(hidden)
    ran = subprocess.run(
        [sys.executable, "-c", _IMPORT, service, *hidden],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def installed_with(packages: set[str]) -> set[str]:
    """These packages and all that they require, without extras."""
    found: set[str] = set()
    new: set[str] = packages
    while new:
        found |= new
        texts = [text for name in new for text in importlib.metadata.requires(name) or ()]
        wanted = [each for each in map(Requirement, texts) if "extra ==" not in str(each.marker)]
        new = {
            str(canonicalize_name(each.name))
            for each in wanted
            if each.marker is None or each.marker.evaluate()
        } - found
    return found


def test_services_report_the_version_of_the_project() -> None:
    assert PROJECT["version"] == VERSION


def test_all_is_the_command_the_three_services_and_their_tests_without_flash_attn() -> None:
    assert names("all") == names("cli", "drafter", "verifier", "gateway", "otel", "test")
    assert "flash-attn" not in names("all") | names("dev")


def test_every_requirement_is_pinned_within_its_bounds() -> None:
    for requirement in requirements("dev"):
        pin = PINS[canonicalize_name(requirement.name)]
        assert pin in requirement.specifier, f"{requirement} is pinned to {pin}"
    assert PINS["torch"] == Version("2.13.0")
    assert Version("6.33") <= PINS["protobuf"] < Version("8")


def test_constraints_are_plain_pins() -> None:
    for line in CONSTRAINTS:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==([0-9]+!)?[0-9][0-9A-Za-z.]*", line), line
    assert len(PINS) == len(CONSTRAINTS)


def test_the_licence_is_apache_2() -> None:
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text
    assert "APPENDIX: How to apply the Apache License to your work." in text
    assert PROJECT["license"] == "Apache-2.0"


def test_the_client_alone_needs_no_package_of_its_command() -> None:
    assert PROJECT["scripts"] == {"tandem": "tandem.cli:main"}
    assert names() == {"grpcio", "googleapis-common-protos", "protobuf"}
    assert names("cli") - names() == {"rich", "typer"}
