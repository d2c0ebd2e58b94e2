"""The Dockerfiles, the build context and the compose file; test_pods.py tests built images."""

import ast
import asyncio
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from servicekit import probe
from servicekit.channels.tls import channel_credentials
from servicekit.config import ServerOptions, parse_config
from servicekit.serving.server import Server
from tests.deploy.manifests import DEPLOY, REPOSITORY, SERVICES, find_tool
from tests.deploy.test_manifests_match_code import CODE, port_of
from tests.integration.stack import running_stack

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


def test_there_is_one_dockerfile_per_service() -> None:
    names = {path.name.removesuffix(".Dockerfile") for path in DOCKERFILES}
    assert names == {*SERVICES, "demo-model"}


def test_hadolint_finds_no_problem() -> None:
    hadolint = find_tool("hadolint")
    done = subprocess.run(
        [hadolint, *map(str, DOCKERFILES)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_its_services_folder_and_its_imports(service: str) -> None:
    copied = {
        text.split()[0] for name, text in instructions(service) if name == "COPY" and "app" in text
    }
    assert copied == {"tandem/__init__.py", "tandem/v1", "servicekit", service}
    assert [text for name, text in final_stage(service) if name == "COPY"] == [
        "--from=build /opt/tandem /opt/tandem"
    ]
    for path in [*(REPOSITORY / service).rglob("*.py"), *(REPOSITORY / "servicekit").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            for module in modules:
                top = module.split(".")[0]
                if top == "tandem":
                    assert module.split(".")[1:2] in ([], ["v1"]), (path, module)
                assert top not in {*SERVICES, "benchmarks", "tests", "examples"} - {service}, path


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


def test_flash_attn_is_compiled_where_a_base_has_cudas_compiler() -> None:
    """By default, what installs has the base of what runs."""
    found = instructions("verifier")
    before = found[: found.index(("FROM", "${BUILD_IMAGE} AS build"))]
    assert ("ARG", "BUILD_IMAGE=${BASE_IMAGE}") in before
    assert final_stage("verifier")[0] == ("FROM", "${BASE_IMAGE}")


@pytest.mark.stand_in
@pytest.mark.parametrize("version", ["", "2.8.3"])
def test_flash_attn_is_installed_only_if_its_version_is_given(version: str, tmp_path: Path) -> None:
    """Runs the instruction with stand-ins for apt-get and pip, which note their arguments."""
    [script] = [
        text
        for name, text in instructions("verifier")
        if name == "RUN" and "FLASH_ATTN_VERSION" in text
    ]
    noted, programs = tmp_path / "noted", tmp_path / "installer" / "bin"
    programs.mkdir(parents=True)
    for name in ("apt-get", "pip", "rm"):
        stand_in = programs / name
        stand_in.write_text(
            f'#!/bin/sh\necho "{name} $* build=$FLASH_ATTENTION_FORCE_BUILD" >> {noted}\n'
        )
        stand_in.chmod(0o755)
    done = subprocess.run(
        ["sh", "-eu", "-c", script],
        cwd=tmp_path,
        env={"PATH": f"{programs}:/usr/bin:/bin", "FLASH_ATTN_VERSION": version}
        | {"FLASH_ATTENTION_FORCE_BUILD": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if not version:
        assert not noted.exists()
        return
    calls = noted.read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["apt-get", "apt-get", "rm", "pip", "pip", "pip"]
    assert all("--python /opt/tandem/bin/python" in call for call in calls[3:])
    compiled = calls[4]
    # Never a wheel of another torch, nor in an environment without this one.
    assert compiled.endswith(f"--no-build-isolation flash-attn=={version} build=TRUE")
    assert "--constraint constraints.txt" in compiled


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


async def test_compose_waits_until_the_gateway_has_a_verifier() -> None:
    """Runs the gateway's check against gateways without and with one."""
    [start] = [
        line
        for line in (REPOSITORY / "docs" / "deploy.md").read_text().splitlines()
        if "compose.yaml up" in line
    ]
    assert "--wait" in start.split("#")[0].split()
    command, *check = compose()["services"]["gateway"]["healthcheck"]["test"]
    assert command == "CMD"
    assert check[:3] == ["python", "-m", "servicekit.probe"]
    port = port_of(image_environment("gateway")["TANDEM_GATEWAY_HEALTH_LISTEN"])
    assert check[3] == f"127.0.0.1:{port}"
    server = ServerOptions(listen="127.0.0.1:0", health_listen="127.0.0.1:0")

    async def exit_code(running: Server) -> int:
        assert running.health_address is not None
        arguments = [running.health_address, *check[4:], "--timeout-s", "20"]
        return await asyncio.to_thread(probe.main, arguments)

    async with running_stack(gateway={"server": server}) as stack:
        assert await exit_code(stack.gateway.server) == 0
    # Port 1 is nobody's.
    config = {"server": server, "verifiers": ["127.0.0.1:1"]}
    alone = GatewayServer(
        GatewayConfig.model_validate(config),
        registry=CollectorRegistry(),
        logger=structlog.wrap_logger(None, processors=[structlog.testing.LogCapture()]),
    )
    await alone.start()
    try:
        assert await exit_code(alone.server) == 1
    finally:
        await alone.stop()
