"""Every overlay and component resolves to valid manifests."""

import copy
import functools
import json
import re
import subprocess

import pytest
import yaml

from tests.deploy import custom_kinds
from tests.deploy.manifests import (
    DEPLOY,
    REPOSITORY,
    VARIANTS,
    find_tool,
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
