"""Every overlay and component resolves to valid manifests."""

import copy
import functools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import custom_kinds
from tests.deploy.manifests import (
    DEPLOY,
    REPOSITORY,
    VARIANTS,
    find_tool,
    kustomize,
    named,
    of_kind,
    resolve,
    resolve_in_namespace,
)
from tests.deploy.monitoring import operator_schemas

SCHEMAS = custom_kinds.SCHEMAS | operator_schemas.SCHEMAS

# The oldest supported version (`preStop: sleep`), and the newest with schemas.
KUBERNETES_VERSIONS = ("1.30", "1.37")


@functools.cache
def check(manifest_json: str) -> None:
    """Checks each manifest once, since most are in several variants."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    manifest = json.loads(manifest_json)
    schema = SCHEMAS.get(manifest["kind"])
    if schema is not None:
        jsonschema.validate(manifest, schema)
        if manifest["kind"] != "LeaderWorkerSet":
            return
        template = manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        metadata = manifest["metadata"]
        kind = {"apiVersion": "v1", "kind": "PodTemplate"}
        manifest = {**kind, "metadata": metadata, "template": template}
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


ON_GITHUB = re.compile(r"https://github\.com/ORGANISATION/tandem//deploy/([\w/-]+)\?ref=v[\d.]+")


def documented_layers(root: str) -> list[dict[str, Any]]:
    """The kustomizations of an overlay of one's own in docs/deploy.md, of this repository's parts:
    the lower layer, and two upper ones.
    """
    text = (REPOSITORY / "docs/deploy.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    written = [block for block in blocks if "kind: Kustomization" in block]
    return [yaml.safe_load(ON_GITHUB.sub(rf"{root}/\1", block)) for block in written]


def test_settings_above_the_documented_parts_win_over_components(tmp_path: Path) -> None:
    root = os.path.relpath(DEPLOY, (tmp_path / "parts").resolve())
    parts, settings, weights = documented_layers(root)
    parts["components"].append(f"{root}/components/model-loader")
    allowed = "TANDEM_VERIFIER_ALLOWED_CLIENTS=tandem-gateway,orchestrator"
    [verifier] = settings["configMapGenerator"]
    verifier["literals"].append(allowed)
    settings["configMapGenerator"] += weights["configMapGenerator"]
    for folder, layer in ((tmp_path / "parts", parts), (tmp_path, settings)):
        folder.mkdir(exist_ok=True)
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(layer))
    manifests = kustomize(tmp_path)
    configured: dict[str, str] = {}
    for manifest in manifests:
        if manifest["kind"] == "ConfigMap":
            configured |= manifest["data"]
    for literal in (allowed, *verifier["literals"], *weights["configMapGenerator"][0]["literals"]):
        name, _, value = literal.partition("=")
        assert configured[name] == value.strip()
    images = {
        container["image"]
        for manifest in manifests
        if manifest["kind"] == "Deployment"
        for container in manifest["spec"]["template"]["spec"]["containers"]
    }
    assert "registry.example/tandem-verifier:0.1.0-cuda" in images


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_are_valid(variant: str) -> None:
    for manifest in resolve(variant):
        check(json.dumps(manifest, sort_keys=True))


def test_the_schemas_refuse_fields_that_do_not_exist() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    [certificate] = [m for m in of_kind("dev+mtls", "Certificate") if m["spec"].get("isCA")]
    wrong = copy.deepcopy(certificate)
    wrong["spec"]["dnsName"] = ["a"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMAS["Certificate"])
    deployment = named("dev", "Deployment", "tandem-gateway")
    wrong = copy.deepcopy(deployment)
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES_VERSIONS[0], strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_manifests_are_in_one_namespace_with_unique_names(variant: str) -> None:
    manifests = resolve(variant)
    assert {m["metadata"].get("namespace") for m in manifests if m["kind"] != "Namespace"} == {
        "tandem"
    }
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_other_namespace_is_left_where_an_overlay_chooses_one(variant: str) -> None:
    manifests = resolve_in_namespace(variant, "serving")
    for manifest in manifests:
        if manifest["kind"] == "Namespace":
            assert manifest["metadata"]["name"] == "serving"
            continue
        assert manifest["metadata"]["namespace"] == "serving"
        text = json.dumps({**manifest, "data": None})
        assert "NAMESPACE" not in text
        # `tandem` alone is a name, and the label of all parts.
        assert not re.search(r"tandem-(gateway|drafter|verifier)\.tandem\b", text)
        assert 'namespace=\\"tandem' not in text


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_match_their_pods(variant: str) -> None:
    pods = [
        m["spec"]["template"]["metadata"]["labels"]
        for m in of_kind(variant, "Deployment", "StatefulSet")
    ]
    for manifest in of_kind(variant, "Deployment", "StatefulSet"):
        selector = manifest["spec"]["selector"]["matchLabels"]
        assert selector.items() <= manifest["spec"]["template"]["metadata"]["labels"].items()
        assert sum(selector.items() <= labels.items() for labels in pods) == 1


def test_every_component_is_in_a_variant() -> None:
    used = {component for _, *components in VARIANTS.values() for component in components}
    there = {folder.parent.name for folder in DEPLOY.glob("components/*/kustomization.yaml")}
    assert there == used


def test_yamllint_finds_no_problem() -> None:
    yamllint = find_tool("yamllint")
    rules = {
        "extends": "default",
        "rules": {
            "document-start": "disable",
            "line-length": "disable",
            "indentation": {"spaces": 2, "indent-sequences": "consistent"},
            "braces": {"max-spaces-inside": 0},
            "truthy": {"allowed-values": ["true", "false"]},
            "octal-values": "disable",
        },
    }
    folders = ["base", "overlays", "components", "compose.yaml"]
    done = subprocess.run(
        [yamllint, "--strict", "-d", yaml.safe_dump(rules), *(f"deploy/{f}" for f in folders)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
