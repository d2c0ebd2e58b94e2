"""Where weights come from: volumes, and the init containers that download into them."""

import fnmatch
import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import (
    REPOSITORY,
    Manifest,
    Workload,
    find_tool,
    render,
    workloads_of,
)
from tests.deploy.test_images import final_stage
from tests.deploy.test_security import selects

HUB, STORE = "hf://someone/model@3f1c", "s3://bucket/models/qwen"
DOWNLOADS = [HUB, STORE]


def release(weights: str, **model: Any) -> tuple[Manifest, ...]:
    return render({"models": [{"name": "model", "weights": weights, **model}]})


def pods(weights: str, **model: Any) -> tuple[Workload, Workload]:
    """The gateway's and the verifier's."""
    [gateway, _, verifier] = workloads_of(release(weights, **model))
    return gateway, verifier


def volume(workload: Workload) -> Any:
    [found] = [each for each in workload.pod["volumes"] if each["name"].startswith("model")]
    return {key: value for key, value in found.items() if key != "name"}


def read_by(workload: Workload) -> str:
    """Where a service reads its model."""
    variables = {"gateway": "TANDEM_GATEWAY_TOKENIZER", "verifier": "TANDEM_VERIFIER_MODEL"}
    return workload.environment[variables[workload.service]]


def claim(name: str, *, is_read_only: bool) -> Any:
    read_only = {"readOnly": True} if is_read_only else {}
    return {"persistentVolumeClaim": {"claimName": name, **read_only}}


def test_a_claim_or_an_image_is_mounted_as_it_is() -> None:
    for workload in pods("pvc://models", path="qwen"):
        assert volume(workload) == claim("models", is_read_only=True)
        assert "initContainers" not in workload.pod
    gateway, verifier = pods("pvc://models", tokenizer="pvc://tokenizers", path="qwen/a.gguf")
    assert volume(gateway) == claim("tokenizers", is_read_only=True)
    assert read_by(gateway) == read_by(verifier) == "/models/model/qwen/a.gguf"
    reference = "registry.example/models/qwen:1"
    for workload in pods(f"oci://{reference}"):
        assert volume(workload) == {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
        assert "initContainers" not in workload.pod


@pytest.mark.parametrize("source", DOWNLOADS)
def test_a_download_goes_to_a_shared_claim_or_a_volume_of_the_pods_own(source: str) -> None:
    _, verifier = pods(source)
    assert volume(verifier) == {"emptyDir": {"sizeLimit": "100Gi"}}
    _, verifier = pods(source, volume={"storageClassName": "local", "size": "200Gi"})
    spec = volume(verifier)["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (spec["storageClassName"], spec["accessModes"]) == ("local", ["ReadWriteOnce"])
    assert spec["resources"]["requests"]["storage"] == "200Gi"
    gateway, verifier = pods(source, volume={"claim": "models"})
    # It is written by the init container, and the verifier's own container reads it.
    assert volume(verifier) == claim("models", is_read_only=False)
    [mount] = [m for m in verifier.container["volumeMounts"] if m["name"] == "model"]
    assert mount["readOnly"] is True
    # Nothing but a tokenizer: the claim may be where gateways cannot be.
    assert volume(gateway) == {"emptyDir": {"sizeLimit": "1Gi"}}


@pytest.mark.parametrize("source", DOWNLOADS)
def test_the_services_read_the_folder_that_is_filled(source: str) -> None:
    for path, file in (("", ""), ("model-Q4_K_M.gguf", "/model-Q4_K_M.gguf")):
        for workload in pods(source, path=path):
            [init] = workload.pod["initContainers"]
            folder = variables(init)["FOLDER"]
            assert read_by(workload) == f"/models/model/{folder}{file}"
            # A label of the source, by which an operator knows it.
            assert re.fullmatch(r"[A-Za-z0-9.-]{1,60}", folder)


@pytest.mark.parametrize("source", DOWNLOADS)
def test_only_pods_that_download_may_call_the_internet(source: str) -> None:
    other = {"name": "other", "weights": "pvc://models"}
    manifests = render({"models": [{"name": "model", "weights": source}, other]})
    [gateway, drafter, *verifiers] = workloads_of(manifests)
    outside = [
        (m["spec"]["podSelector"], rule)
        for m in manifests
        if m["kind"] == "NetworkPolicy"
        for rule in m["spec"].get("egress", ())
        if any("ipBlock" in peer for peer in rule["to"])
    ]
    [(selector, rule)] = outside
    admitted = [each for each in (gateway, drafter, *verifiers) if selects(selector, each.labels)]
    assert [each.name for each in admitted] == ["tandem-gateway", "tandem-verifier-model"]
    assert rule["ports"] == [{"port": 443, "protocol": "TCP"}]
    excepted = {network for peer in rule["to"] for network in peer["ipBlock"]["except"]}
    # Other pods, and a cloud's credentials.
    assert {"10.0.0.0/8", "169.254.0.0/16", "fc00::/7"} <= excepted


def test_the_hubs_client_is_in_the_services_images() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for workload, package in zip(pods(HUB), ("tokenizers", "transformers"), strict=True):
        [init] = workload.pod["initContainers"]
        assert init["image"] == workload.container["image"]
        required = project["optional-dependencies"][workload.service]
        assert any(requirement.startswith(package) for requirement in required)
        hub = importlib.metadata.requires(package) or []
        assert any(re.match(r"huggingface.hub\b(?!.*extra)", requirement) for requirement in hub)
        assert "PATH=/opt/tandem/bin:" in dict(final_stage(workload.service))["ENV"]
        assert variables(init)["HF_HUB_OFFLINE"] == "0"
        assert variables(init)["REVISION"] == "3f1c"
    [init] = pods("hf://someone/model")[1].pod["initContainers"]
    assert variables(init)["REVISION"] == "main"


@pytest.mark.parametrize("source", DOWNLOADS)
def test_secrets_reach_the_download_alone(source: str) -> None:
    for workload in pods(source, downloadSecret="tandem-hub"):
        [init] = workload.pod["initContainers"]
        assert init["envFrom"] == [{"secretRef": {"name": "tandem-hub"}}]
        assert "envFrom" not in workload.container


@pytest.mark.parametrize("source", DOWNLOADS)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_every_file_that_a_service_reads_is_downloaded(source: str, name: str) -> None:
    for workload in pods(source):
        [init] = workload.pod["initContainers"]
        patterns = variables(init)["FILES"].split()
        is_read = workload.service == "verifier" or not name.endswith(".safetensors")
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns) is is_read


def variables(container: Manifest) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("env", ())}


class TestScript:
    """Runs it, where a folder of commands stands before the environment's."""

    @pytest.fixture(autouse=True, params=DOWNLOADS)
    def folders(self, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        self.source = request.param
        self.models = tmp_path / "models"
        self.models.mkdir()
        self.commands = tmp_path / "commands"
        self.commands.mkdir()

    def start(self, download: str, **model: Any) -> "subprocess.Popen[bytes]":
        """With a download in place of the real one that runs in its target folder."""
        command = self.commands / ("hf" if self.source == HUB else "rclone")
        command.write_text(
            "#!/bin/sh -e\n"
            f'echo "$@" >> {self.commands}/arguments\n'
            'if [ "$1" = copy ]; then folder="$3"; else\n'
            '    while [ "$1" != --local-dir ]; do shift; done; folder="$2"\n'
            "fi\n"
            f'mkdir -p "$folder"; cd "$folder"; {download}\n'
        )
        command.chmod(0o755)
        [init] = pods(self.source, **model)[1].pod["initContainers"]
        [*shell, script] = init["command"]
        assert script.count("/models") == 1
        return subprocess.Popen(
            [*shell, script.replace("/models", str(self.models))],
            env={"PATH": f"{self.commands}:{os.environ['PATH']}", **variables(init)},
        )

    def run(self, download: str, **model: Any) -> int:
        return self.start(download, **model).wait(timeout=60)

    @property
    def arguments(self) -> list[str]:
        return (self.commands / "arguments").read_text().splitlines()

    @property
    def filled(self) -> dict[str, set[str]]:
        return {
            folder.name: {path.name for path in folder.iterdir()}
            for folder in self.models.iterdir()
            if not folder.name.startswith(".")
        }

    def test_the_folder_appears_whole_or_not_at_all(self) -> None:
        assert self.run("touch config.json; exit 3") != 0
        assert not self.filled
        # What the first attempt left is there.
        assert self.run("test -e config.json; touch model.safetensors") == 0
        assert list(self.filled.values()) == [{"config.json", "model.safetensors"}]
        assert self.run("exit 3") == 0

    def test_pods_that_start_together_download_once(self) -> None:
        started = [self.start("touch config.json; sleep 0.3") for _ in range(3)]
        assert [each.wait(timeout=60) for each in started] == [0, 0, 0]
        assert len(self.arguments) == 1

    def test_the_download_is_told_what_to_fetch(self) -> None:
        # A file that a pattern would match here is no argument.
        (self.models / "x.json").touch()
        assert self.run("touch config.json") == 0
        [arguments] = self.arguments
        asked = "someone/model --revision 3f1c" if self.source == HUB else ":s3:bucket/models/qwen"
        assert asked in arguments
        assert re.findall(r"--include (\S+)", arguments) == ["*.json", "*.jinja", "*.safetensors"]

    def test_of_a_gguf_repository_one_file_is_fetched(self) -> None:
        assert self.run("touch a.gguf", path="a.gguf") == 0
        assert re.findall(r"--include (\S+)", self.arguments[0]) == ["a.gguf"]

    def test_the_hubs_client_takes_these_arguments(self) -> None:
        self.source = HUB
        tool = find_tool("hf")
        assert self.run("true") == 0
        words = self.arguments[0].split()
        shown = subprocess.run(
            [tool, words[0], "--help"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for flag in (word for word in words if word.startswith("--")):
            assert flag in shown, flag
