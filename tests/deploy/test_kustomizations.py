"""Every overlay and component resolves to valid manifests."""

import functools
import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.requests.clients_file import read_clients
from tests.deploy.manifests import (
    DEPLOY,
    REPOSITORY,
    VARIANTS,
    Manifest,
    find_tool,
    kustomize,
    of_kind,
    resolve,
    resolve_in_namespace,
    write_kustomization,
)

# Kubernetes has no schemas for their kinds.
CUSTOM_GROUPS = ("cert-manager.io", "gateway.networking.k8s.io", "keda.sh", "monitoring.coreos.com")

# The oldest supported version (`preStop: sleep`), and the newest with schemas.
KUBERNETES_VERSIONS = ("1.30", "1.37")


@functools.cache
def check(manifest_json: str) -> None:
    """Checks each manifest once, since most are in several variants."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    manifest = json.loads(manifest_json)
    if manifest["apiVersion"].startswith(CUSTOM_GROUPS):
        return
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


# No other registry has them than the reader's.
REGISTRY_IMAGES = {
    "registry.example/tandem-gateway:0.1.0",
    "registry.example/tandem-drafter:0.1.0",
    "registry.example/tandem-verifier:0.1.0-cuda",
}

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
    assert service_images(manifests) == REGISTRY_IMAGES


def service_images(manifests: Iterable[Manifest]) -> set[str]:
    return {
        container["image"]
        for manifest in manifests
        if manifest["kind"] in ("Deployment", "StatefulSet")
        for container in manifest["spec"]["template"]["spec"]["containers"]
    }


def documented_settings(page: str, name: str) -> dict[str, Any]:
    """The block of settings of a page that has this text in it."""
    blocks = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / page).read_text(), re.DOTALL)
    [written] = [block for block in blocks if name in block]
    settings: dict[str, Any] = yaml.safe_load(written)
    return settings


def with_settings(
    folder: Path, settings: dict[str, Any], *components: str, overlay: str = "dev"
) -> list[Any]:
    """An overlay with components, and the settings above it, in a folder."""
    root = os.path.relpath(DEPLOY, (folder / "parts").resolve())
    (folder / "parts").mkdir()
    write_kustomization(
        folder / "parts",
        resources=[f"{root}/overlays/{overlay}"],
        components=[f"{root}/components/{component}" for component in components],
    )
    write_kustomization(folder, resources=["parts"], **settings)
    return list(kustomize(folder))


def test_the_documented_images_are_those_of_every_overlay(tmp_path: Path) -> None:
    settings = documented_layers("deploy")[1]
    for overlay in ("dev", "gpu", "ha"):
        (tmp_path / overlay).mkdir()
        images = service_images(
            with_settings(tmp_path / overlay, {"images": settings["images"]}, overlay=overlay)
        )
        assert images == REGISTRY_IMAGES
    # The compose file builds those of the dev overlay.
    compose = (DEPLOY / "compose.yaml").read_text()
    compose = compose.replace("${REGISTRY:-docker.io/library}/", "").replace("${TAG:-dev}", "dev")
    built = {each["image"] for each in yaml.safe_load(compose)["services"].values()}
    assert service_images(resolve("dev")) < built


def test_the_documented_clients_file_reaches_the_gateways(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text()
    [clients] = re.findall(r"```yaml\n(tenants:.*?)```", page, re.DOTALL)
    # The page shows the beginnings of digests.
    (tmp_path / "clients.yaml").write_text(
        re.sub(r"(?<=token_sha256: )(\w+)\.\.\.", lambda shown: shown[1].ljust(64, "0"), clients)
    )
    assert len(read_clients(tmp_path / "clients.yaml").by_token) == 2
    settings = documented_settings("security.md", "secretGenerator")
    manifests = with_settings(tmp_path, settings)
    for manifest in manifests:
        check(json.dumps(manifest, sort_keys=True))
    [secret] = [each for each in manifests if each["kind"] == "Secret"]
    assert list(secret["data"]) == ["clients.yaml"]
    [gateway] = [
        each
        for each in manifests
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "tandem-gateway"
    ]
    pod = gateway["spec"]["template"]["spec"]
    [volume] = [each for each in pod["volumes"] if each["name"] == "clients"]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "clients"]
    [file] = [
        value
        for each in manifests
        if each["kind"] == "ConfigMap"
        for name, value in each["data"].items()
        if name == "TANDEM_GATEWAY_CLIENTS"
    ]
    assert file == f"{mount['mountPath']}/clients.yaml"


def test_the_documented_patch_names_another_gateway_in_every_route(tmp_path: Path) -> None:
    settings = documented_settings("deploy.md", "parentRefs")
    manifests = with_settings(tmp_path, settings, "gateway-api")
    parents = [
        parent
        for each in manifests
        if each["kind"].endswith("Route")
        for parent in each["spec"]["parentRefs"]
    ]
    assert len(parents) == 2
    assert {(each["name"], each["namespace"]) for each in parents} == {
        ("my-gateway", "my-namespace")
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_are_valid(variant: str) -> None:
    for manifest in resolve(variant):
        check(json.dumps(manifest, sort_keys=True))


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
        assert not re.search(r"tandem-(gateway|gateway-http|drafter|verifier)\.tandem\b", text)
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
