"""The Job that fills the models' volume: what it may do, and its script."""

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
    environment,
    named,
    of_kind,
    workloads,
)
from tests.deploy.test_images import final_stage
from tests.deploy.test_security import selects

VARIANT = "gpu+model-loader"


@pytest.fixture
def pod() -> Any:
    return named(VARIANT, "Job", "tandem-model-loader")["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: Any) -> Any:
    [container] = pod["containers"]
    return container


def labels() -> dict[str, str]:
    template = named(VARIANT, "Job", "tandem-model-loader")["spec"]["template"]
    return dict(template["metadata"]["labels"])


def test_it_is_restricted_and_writes_to_the_claims_that_all_others_only_read(
    pod: Any, container: Any
) -> None:
    [other] = [w.pod for w in workloads(VARIANT) if w.service == "verifier"]
    assert pod["securityContext"] == other["securityContext"]
    assert container["securityContext"] == other["containers"][0]["securityContext"]
    assert pod["automountServiceAccountToken"] is False
    assert "memory" in container["resources"]["limits"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    variables = {one["name"]: one.get("value") for one in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert all(not mount.get("readOnly") for mount in container["volumeMounts"])
    claims = set()
    for service, written, variable in (
        ("verifier", "model", "MODELS"),
        # Nothing but a tokenizer: the weights may be where gateways cannot be.
        ("gateway", "tokenizer", "TOKENIZERS"),
    ):
        claim = volumes[written]["persistentVolumeClaim"]
        assert not claim.get("readOnly")
        assert mounts[written] == variables[variable]
        [pod] = [w.pod for w in workloads(VARIANT) if w.service == service]
        [read] = [v for v in pod["volumes"] if "persistentVolumeClaim" in v]
        assert read["persistentVolumeClaim"] == {**claim, "readOnly": True}
        claims.add(claim["claimName"])
    assert claims == {m["metadata"]["name"] for m in of_kind(VARIANT, "PersistentVolumeClaim")}
    assert len(claims) == 2


def test_it_alone_may_call_the_internet_and_nobody_may_call_it() -> None:
    outside = {}
    for policy in of_kind(VARIANT, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", ()):
            if any("ipBlock" in peer for peer in rule["to"]):
                outside[policy["metadata"]["name"]] = policy["spec"], rule
    assert outside.keys() == {"tandem-model-loader"}
    spec, rule = outside["tandem-model-loader"]
    assert selects(spec["podSelector"], labels())
    assert not any(selects(spec["podSelector"], w.labels) for w in workloads(VARIANT))
    assert rule["ports"] == [{"port": 443, "protocol": "TCP"}]
    excepted = {network for peer in rule["to"] for network in peer["ipBlock"]["except"]}
    # Other pods, and a cloud's credentials.
    assert {"10.0.0.0/8", "169.254.0.0/16", "fc00::/7"} <= excepted
    for policy in of_kind(VARIANT, "NetworkPolicy"):
        if "Ingress" in policy["spec"]["policyTypes"] and policy["spec"].get("ingress"):
            callers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
            is_admitted = selects(policy["spec"]["podSelector"], labels())
            # Prometheus may scrape every pod's port of the name `metrics`; this one has none.
            assert not is_admitted or policy["metadata"]["name"] == "tandem-prometheus-to-metrics"
            assert not any(
                selects(peer.get("podSelector", {"matchLabels": {"": ""}}), labels())
                for peer in callers
            )


def test_its_image_is_the_verifiers_and_holds_the_hubs_client(container: Any) -> None:
    [verifier] = [w.container for w in workloads(VARIANT) if w.service == "verifier"]
    assert container["image"] == verifier["image"]
    # transformers requires it, and its scripts are on the image's path.
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    required = project["optional-dependencies"]["verifier"]
    assert any(requirement.startswith("transformers") for requirement in required)
    hub = importlib.metadata.requires("transformers") or []
    assert any(re.match(r"huggingface.hub\b(?!.*extra)", requirement) for requirement in hub)
    assert "PATH=/opt/tandem/bin:" in dict(final_stage("verifier"))["ENV"]
    offline = {one["name"]: one.get("value") for one in container["env"]}["HF_HUB_OFFLINE"]
    assert "HF_HUB_OFFLINE=1" in dict(final_stage("verifier"))["ENV"]
    assert offline == "0"


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
def test_every_file_that_the_services_read_is_downloaded(container: Any, name: str) -> None:
    [_, _, script] = container["command"]
    patterns = re.findall(r"--include '([^']+)'", script)
    assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def test_the_services_read_the_folder_that_it_fills(container: Any) -> None:
    [source] = container["envFrom"]
    variables = named(VARIANT, "ConfigMap", source["configMapRef"]["name"])["data"]
    folder = "/models/" + variables["MODEL_FOLDER"]
    for workload in workloads(VARIANT):
        config = environment(VARIANT, workload)
        for name in ("TANDEM_VERIFIER_MODEL", "TANDEM_GATEWAY_TOKENIZER"):
            assert config.get(name, folder) == folder


class TestScript:
    """Runs it, where a folder of commands stands before the environment's."""

    @pytest.fixture(autouse=True)
    def folders(self, tmp_path: Path, container: Any) -> None:
        self.models = tmp_path / "models"
        self.models.mkdir()
        self.tokenizers = tmp_path / "tokenizers"
        self.tokenizers.mkdir()
        self.commands = tmp_path / "commands"
        self.commands.mkdir()
        self.command = container["command"]
        assert {one["name"]: one.get("value") for one in container["env"]}["MODELS"] == "/models"

    def run(self, download: str, *, repository: str = "someone/something") -> int:
        """The exit code, with a download in place of the Hub's that runs in its target folder."""
        hub = self.commands / "hf"
        hub.write_text(
            "#!/bin/sh -e\n"
            'while [ "$1" != --local-dir ]; do shift; done\n'
            f'mkdir -p "$2"; cd "$2"; {download}\n'
        )
        hub.chmod(0o755)
        done = subprocess.run(
            self.command,
            env={
                "PATH": f"{self.commands}:{os.environ['PATH']}",
                "MODELS": str(self.models),
                "TOKENIZERS": str(self.tokenizers),
                "MODEL_REPOSITORY": repository,
                "MODEL_REVISION": "main",
                "MODEL_FOLDER": "model",
            },
            timeout=60,
            check=False,
        )
        return done.returncode

    def test_the_folder_appears_whole_or_not_at_all(self) -> None:
        assert self.run("touch config.json; exit 3") != 0
        assert not (self.models / "model").exists()
        assert not list(self.tokenizers.iterdir())
        # What the first attempt left is there.
        assert self.run("test -e config.json; touch model.safetensors") == 0
        found = {path.name for path in (self.models / "model").iterdir()}
        assert found == {"config.json", "model.safetensors"}
        assert len(list(self.models.iterdir())) == 1

    def test_what_an_attempt_for_another_repository_left_is_not_used(self) -> None:
        assert self.run("touch model.safetensors; exit 3", repository="someone/other") != 0
        assert self.run("touch config.json") == 0
        assert [path.name for path in (self.models / "model").iterdir()] == ["config.json"]

    def test_gateways_get_all_but_the_weights(self) -> None:
        files = "tokenizer.json templates/a.jinja model.safetensors .cache/x.json"
        assert self.run(f"mkdir templates .cache; touch {files}") == 0
        [folder] = self.tokenizers.iterdir()
        assert folder.name == "model"
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert found == {"tokenizer.json", "templates/a.jinja"}

    def test_a_folder_that_is_there_is_left_alone(self) -> None:
        (self.models / "model").mkdir()
        (self.models / "model" / "tokenizer.json").touch()
        assert self.run("touch config.json") == 0
        assert [path.name for path in (self.models / "model").iterdir()] == ["tokenizer.json"]
        # One of an earlier version, too, gets what gateways read.
        assert [path.name for path in (self.tokenizers / "model").iterdir()] == ["tokenizer.json"]
        (self.models / "model" / "config.json").touch()
        assert self.run("exit 3") == 0
        assert [path.name for path in (self.tokenizers / "model").iterdir()] == ["tokenizer.json"]
