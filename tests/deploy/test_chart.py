"""The chart renders valid manifests, and refuses values that it does not know."""

import functools
import json
import re
import subprocess
from collections.abc import Iterable
from typing import Any

import pytest
import yaml

from gateway.requests.clients_file import read_clients
from tests.deploy.manifests import (
    CHART,
    DEPLOY,
    REPOSITORY,
    VARIANTS,
    Manifest,
    Values,
    find_tool,
    helm_python,
    render,
    resolve,
    workloads_of,
)

# Kubernetes has no schemas for their kinds.
CUSTOM_GROUPS = (
    "cert-manager.io",
    "gateway.envoyproxy.io",
    "gateway.networking.k8s.io",
    "inference.networking.k8s.io",
    "keda.sh",
    "monitoring.coreos.com",
)

# The oldest supported version (`preStop: sleep`), and the newest with schemas.
KUBERNETES_VERSIONS = ("1.30", "1.37")

MODEL = {"name": "model", "weights": "pvc://models"}


@functools.cache
def check(manifest_json: str) -> None:
    """Checks each manifest once, since most are in several variants."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    manifest = json.loads(manifest_json)
    if manifest["apiVersion"].startswith(CUSTOM_GROUPS):
        return
    # Images as volumes are newer.
    is_newer = '"image": {"pullPolicy"' in manifest_json
    for version in KUBERNETES_VERSIONS[is_newer:]:
        kubernetes_validate.validate(manifest, version, strict=True)


def documented(page: str, name: str) -> Values:
    """The block of values of a page that has this text in it."""
    blocks = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / page).read_text(), re.DOTALL)
    [written] = [block for block in blocks if name in block]
    values: Values = yaml.safe_load(written)
    return values


def documented_values() -> list[Values]:
    """The examples of values in docs/deploy.md."""
    page = (REPOSITORY / "docs" / "deploy.md").read_text()
    blocks = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    return [block for block in blocks if "kind" not in block]


def images(manifests: Iterable[Manifest]) -> set[str]:
    return {
        container["image"]
        for workload in workloads_of(tuple(manifests))
        for container in workload.containers
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_helm_accepts_the_chart(variant: str) -> None:
    report = helm_python.lint(CHART, VARIANTS[variant], strict=True)
    assert report["errors"] == []
    # An icon is recommended.
    assert {message["severity"] for message in report["messages"]} <= {1}


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_are_valid(variant: str) -> None:
    manifests = resolve(variant)
    for manifest in manifests:
        check(json.dumps(manifest, sort_keys=True))
    names = [(m["apiVersion"], m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
    # Else they would lie in the namespace that kubectl has chosen.
    assert {m["metadata"]["namespace"] for m in manifests} == {"tandem"}
    # It belongs to whoever made it, with all that is in it.
    assert "Namespace" not in {m["kind"] for m in manifests}


def test_the_images_of_the_examples_are_those_that_are_built() -> None:
    compose = (DEPLOY / "compose.yaml").read_text()
    compose = compose.replace("${REGISTRY:-docker.io/library}/", "").replace("${TAG:-dev}", "dev")
    built = {each["image"] for each in yaml.safe_load(compose)["services"].values()}
    assert images(resolve("dev")) == built


def test_images_have_registries_digests_and_pull_secrets() -> None:
    digest = "@sha256:" + 64 * "0"
    manifests = render(
        {
            "images": {
                "registry": "registry.example/",
                "pullPolicy": "Always",
                "pullSecrets": ["a", "b"],
            },
            "gateway": {"image": f"tandem-gateway{digest}"},
            "drafter": {"image": f"tandem-drafter:1{digest}"},
            "models": [{**MODEL, "image": "tandem-verifier:2", "weights": "hf://someone/model"}],
        }
    )
    assert images(manifests) == {
        f"registry.example/tandem-gateway{digest}",
        f"registry.example/tandem-drafter:1{digest}",
        "registry.example/tandem-verifier:2",
    }
    for workload in workloads_of(manifests):
        assert workload.pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
        assert {each["imagePullPolicy"] for each in workload.containers} == {"Always"}


def test_the_documented_values_are_known() -> None:
    found = documented_values()
    assert len(found) >= 3
    for values in found:
        for manifest in render(values):
            check(json.dumps(manifest, sort_keys=True))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"modles": []}, "modles"),
        ({"models": []}, "models"),
        ({"models": [{**MODEL, "gpu": 1}]}, "gpu"),
        ({"models": [{**MODEL, "gpus": -1}]}, "gpus"),
        ({"models": [{"name": "model"}]}, "weights"),
        ({"models": [{**MODEL, "name": "Model"}]}, "name"),
        ({"models": [{**MODEL, "weights": "https://models.example"}]}, "weights"),
        ({"models": [MODEL, MODEL]}, "two have the name model"),
        ({"models": [{**MODEL, "config": {"max_num_seq": 1}}]}, "max_num_seq"),
        ({"models": [{**MODEL, "config": {"listen": "0.0.0.0:1"}}]}, "listen"),
        ({"models": [{**MODEL, "autoscaling": {"min": 2}}]}, "max"),
        ({"modelDefaults": {"name": "model"}}, "modelDefaults/name"),
        ({"gateway": {"config": {"max_history_bytes": 1}}}, "max_history_bytes"),
        ({"gateway": {"aliases": {"chat": {"model": 0}}}}, "aliases/chat/model"),
        ({"drafter": {"replicas": "two"}}, "replicas"),
        ({"mtls": "yes"}, "mtls"),
        ({"networkPolicy": {"dns": {"port": 53}}}, "port"),
        ({"inferencePool": {"endpointPicker": {"failureMode": "Open"}}}, "failureMode"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(values: Values, named: str) -> None:
    with pytest.raises(helm_python.HelmError, match=named):
        render(values)


def test_a_name_that_is_too_long_for_kubernetes_is_refused() -> None:
    model = {**MODEL, "name": 40 * "m"}
    render({"models": [model]}, release=13 * "r")
    with pytest.raises(helm_python.HelmError, match="over 63 characters"):
        render({"models": [model]}, release=14 * "r")


def test_every_value_has_a_default_and_every_default_is_allowed() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    model = schema["$defs"]["model"]["properties"]
    assert values.keys() == schema["properties"].keys() - {"global"}
    assert values["modelDefaults"].keys() == model.keys() - {"name", "id", "weights", "tokenizer"}
    for name in ("gateway", "drafter", "networkPolicy", "gatewayApi", "inferencePool"):
        assert values[name].keys() == schema["properties"][name]["properties"].keys()


def test_what_is_extra_is_in_the_services_own_pods() -> None:
    claim = {"name": "verdicts", "persistentVolumeClaim": {"claimName": "verdicts"}}
    mount = {"name": "verdicts", "mountPath": "/verdicts"}
    variable = {"name": "NUMBA_CACHE_DIR", "value": "/verdicts"}
    extra = {
        "extraVolumes": [claim],
        "extraVolumeMounts": [mount],
        "extraEnv": [variable],
        "serviceAccountAnnotations": {"role": "reader"},
        "podAnnotations": {"note": "kept"},
    }
    manifests = render({"modelDefaults": extra, "drafter": extra})
    for manifest in manifests:
        check(json.dumps(manifest, sort_keys=True))
        if manifest["kind"] == "ServiceAccount":
            is_gateway = manifest["metadata"]["name"] == "tandem-gateway"
            assert ("annotations" in manifest["metadata"]) is not is_gateway
    for workload in workloads_of(manifests):
        is_there = workload.service != "gateway"
        assert (claim in workload.pod["volumes"]) is is_there
        assert (mount in workload.container["volumeMounts"]) is is_there
        assert (variable in workload.container["env"]) is is_there
        assert ("annotations" in workload.template["metadata"]) is is_there


def test_the_documented_clients_file_reaches_the_gateways(tmp_path: Any) -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text()
    [clients] = re.findall(r"```yaml\n(tenants:.*?)```", page, re.DOTALL)
    # The page shows the beginnings of digests.
    (tmp_path / "clients.yaml").write_text(
        re.sub(r"(?<=token_sha256: )(\w+)\.\.\.", lambda shown: shown[1].ljust(64, "0"), clients)
    )
    assert len(read_clients(tmp_path / "clients.yaml").by_token) == 2
    assert "kubectl -n tandem create secret generic tandem-clients --from-file=clients.yaml" in page
    gateway = workloads_of(render(documented("security.md", "clientsSecret")))[0]
    [volume] = [each for each in gateway.pod["volumes"] if each["name"] == "clients"]
    assert volume["secret"] == {"secretName": "tandem-clients", "defaultMode": 0o440}
    [mount] = [each for each in gateway.container["volumeMounts"] if each["name"] == "clients"]
    file = gateway.environment["TANDEM_GATEWAY_CLIENTS"]
    assert file == f"{mount['mountPath']}/clients.yaml"


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
        },
    }
    files = ["chart/Chart.yaml", "chart/values.yaml", "chart/examples", "compose.yaml"]
    done = subprocess.run(
        [yamllint, "--strict", "-d", yaml.safe_dump(rules), *(f"deploy/{file}" for file in files)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
