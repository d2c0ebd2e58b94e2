"""The Dockerfiles, the build context and the compose file; test_pods.py tests built images."""

import ast
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from servicekit.channels.tls import channel_credentials
from servicekit.config import parse_config
from tests.deploy.manifests import DEPLOY, REPOSITORY, SERVICES, find_tool
from tests.deploy.test_manifests_match_code import CODE, port_of

DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def instructions(service: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, with continued lines joined and without comments."""
    lines: list[str] = []
    continued = False
    for line in (DEPLOY / "docker" / f"{service}.Dockerfile").read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if continued:
            lines[-1] += " " + line.strip().removesuffix("\\").strip()
        else:
            lines.append(line.removesuffix("\\").strip())
        continued = line.endswith("\\")
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def final_stage(service: str) -> list[tuple[str, str]]:
    found = instructions(service)
    start = max(i for i, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


def image_environment(service: str) -> dict[str, str]:
    pairs = [pair for name, text in final_stage(service) if name == "ENV" for pair in text.split()]
    return dict(pair.split("=", 1) for pair in pairs)


def test_hadolint_finds_no_problem() -> None:
    hadolint = find_tool("hadolint")
    done = subprocess.run(
        [hadolint, *map(str, DOCKERFILES)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def imported(folder: str) -> set[str]:
    """The modules that a folder's files, or one file, import."""
    path = REPOSITORY / folder
    found = set()
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_its_services_folder_and_its_imports(service: str) -> None:
    copied = {
        source
        for name, text in instructions(service)
        if name == "COPY" and "app" in text
        for source in text.split()[:-1]
    }
    needed, new = {"tandem/__init__.py"}, {"servicekit", service}
    while new:
        needed |= new
        modules = set().union(*map(imported, new))
        assert not {each.partition(".")[0] for each in modules} & {
            *{*SERVICES, "benchmarks", "tests", "examples"} - {service}
        }
        names = {module.split(".")[1] for module in modules if module.startswith("tandem.")}
        new = {"tandem/v1" if each == "v1" else f"tandem/{each}.py" for each in names} - needed
    assert copied == needed
    assert [text for name, text in final_stage(service) if name == "COPY"] == [
        "--from=build /opt/tandem /opt/tandem"
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_has_a_user_labels_and_a_health_check(service: str) -> None:
    stage = dict(final_stage(service))
    user, _, group = stage["USER"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert yaml.safe_load(stage["ENTRYPOINT"]) == ["python", "-m", service]
    labels = stage["LABEL"]
    for label in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in labels
    assert f"VERSION={PROJECT['version']}" in [t for n, t in final_stage(service) if n == "ARG"]


@pytest.mark.parametrize("service", SERVICES)
def test_an_images_ports_and_health_check_match_its_configuration(service: str) -> None:
    stage = dict(final_stage(service))
    environ = image_environment(service)
    needed = {"verifier": ["--model", "/model"], "gateway": ["--verifiers", "a:1"]}
    config: Any = parse_config(
        CODE[service].config, service=service, argv=needed.get(service, []), environ=environ
    )
    health = port_of(config.server.health_listen)
    ports = [port_of(config.server.listen), port_of(config.server.metrics_listen), health]
    if service == "gateway":
        ports.append(port_of(config.http_listen))
    assert [int(port) for port in stage["EXPOSE"].split()] == ports
    # The image does not allow plaintext; its operator may.
    assert not config.server.allow_plaintext
    check = yaml.safe_load(stage["HEALTHCHECK"].partition("CMD ")[2])
    assert check[:3] == ["python", "-m", "servicekit.probe"]
    assert check[3:] == [f"127.0.0.1:{health}", "--service", "tandem.liveness"]


def test_the_build_context_holds_exactly_the_copied_files() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    admitted = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        source
        for path in DOCKERFILES
        for name, text in instructions(path.name.removesuffix(".Dockerfile"))
        if name == "COPY" and not text.startswith("--from")
        for source in text.split()[:-1]
    }
    assert admitted == copied
    assert all((REPOSITORY / path).exists() for path in copied)


@pytest.mark.parametrize("service", SERVICES)
def test_requirements_are_those_of_the_extras_without_tandem(
    service: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = DEPLOY / "docker" / "requirements.py"
    arguments = [str(script), str(REPOSITORY / "pyproject.toml"), service, "otel"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    extras = PROJECT["optional-dependencies"]
    own = [line for line in extras[service] if not line.startswith("tandem-serve")]
    own += extras["otel"]
    assert sorted(printed) == sorted([*PROJECT["dependencies"], *extras["servicekit"], *own])


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return content


def test_the_compose_file_is_valid() -> None:
    """Validates it with models generated from the Compose specification's schema.

    They check values and let unknown keys pass; so the keys are looked at here.
    """
    compose_spec = pytest.importorskip("compose_spec")
    content = compose()
    content.pop("x-service")
    compose_spec.ComposeSpecification.model_validate(content)
    fields = compose_spec.Service.model_fields
    known = {field.alias or name for name, field in fields.items()}
    for entry in content["services"].values():
        assert set(entry) <= known


def test_the_compose_file_matches_the_services() -> None:
    services = compose()["services"]
    assert set(services) == {*SERVICES, "demo-model"}
    for service in SERVICES:
        entry = services[service]
        config: Any = parse_config(
            CODE[service].config,
            service=service,
            argv=[],
            environ=image_environment(service) | entry["environment"],
        )
        known = {key for key in entry["environment"] if key.startswith(f"TANDEM_{service.upper()}")}
        assert known == set(entry["environment"])
        assert entry["read_only"] is True
        assert entry["cap_drop"] == ["ALL"]
        assert config.server.drain_timeout_s < int(entry["stop_grace_period"].removesuffix("s"))
        for address in [*getattr(config, "verifiers", ()), *getattr(config, "drafters", ())]:
            assert channel_credentials(address, config.peers) is None
            callee, _, port = address.partition(":")
            assert int(port) == port_of(
                image_environment(callee)[f"TANDEM_{callee.upper()}_LISTEN"]
            )
    drafters = services["gateway"]["environment"]["TANDEM_GATEWAY_DRAFTERS"]
    assert services["verifier"]["environment"]["TANDEM_VERIFIER_DRAFTERS"] == drafters
    for entry in services.values():
        assert int(entry["user"].partition(":")[0]) > 0
        dockerfile = Path(entry["build"]["dockerfile"])
        assert (DEPLOY / entry["build"]["context"] / dockerfile).exists()
    # Without TLS, so reachable from this machine only.
    published = [port for entry in services.values() for port in entry.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_compose_waits_until_the_gateway_is_well() -> None:
    [start] = [
        line
        for line in (REPOSITORY / "docs" / "deploy.md").read_text().splitlines()
        if "compose.yaml up" in line
    ]
    assert "--wait" in start.split("#")[0].split()
    command, *check = compose()["services"]["gateway"]["healthcheck"]["test"]
    port = port_of(image_environment("gateway")["TANDEM_GATEWAY_HEALTH_LISTEN"])
    # Of the whole service, which is well once it has a verifier.
    assert [command, *check] == ["CMD", "python", "-m", "servicekit.probe", f"127.0.0.1:{port}"]
