"""Releases and models side by side in one namespace do not touch each other's pods."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.manifests import VARIANTS, Manifest, Workload, render, workloads_of
from tests.deploy.test_security import selects

SHARED = "tandem-prometheus-to-metrics"
# Two of one chart, and two models each. One name begins with the other.
RELEASES = ("tandem", "tandem-b")


def side_by_side(release: str) -> tuple[Manifest, ...]:
    return render(VARIANTS["all"], release=release, namespace="serving")


def pod_selectors(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """All selectors of pods within an object's own namespace, wherever they are in it."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "Service":
        yield {"matchLabels": spec["selector"]}
    elif kind in ("Deployment", "StatefulSet"):
        yield spec["selector"]
        for constraint in spec["template"]["spec"]["topologySpreadConstraints"]:
            yield constraint["labelSelector"]
    elif kind in ("PodDisruptionBudget", "ServiceMonitor", "InferencePool"):
        yield spec["selector"]
    elif kind == "NetworkPolicy":
        yield spec["podSelector"]
        for rule in (*spec.get("ingress", ()), *spec.get("egress", ())):
            for peer in (*rule.get("from", ()), *rule.get("to", ())):
                if "podSelector" in peer and "namespaceSelector" not in peer:
                    yield peer["podSelector"]


@pytest.mark.parametrize(("mine", "other"), [RELEASES, RELEASES[::-1]])
def test_nothing_selects_or_names_what_is_another_releases(mine: str, other: str) -> None:
    manifests, others = side_by_side(mine), side_by_side(other)
    names = [{(m["kind"], m["metadata"]["name"]) for m in each} for each in (manifests, others)]
    assert not names[0] & names[1]
    num_selectors = 0
    for manifest in manifests:
        for selector in pod_selectors(manifest):
            num_selectors += 1
            for workload in workloads_of(others):
                assert not selects(selector, workload.labels), manifest["metadata"]["name"]
    assert num_selectors > 30
    # Addresses, certificates, targets of scaling and queries.
    text = json.dumps([m for m in manifests if m["kind"] not in ("PrometheusRule", "ConfigMap")])
    called = set(re.findall(r"\b(tandem(?:-b)?)-(?:gateway|drafter|verifier|ca)\b", text))
    jobs = {"tandem"} if '"replacement": "tandem-gateway"' in text else set()
    assert called - jobs == {mine} - jobs
    instances = set(re.findall(r'"app.kubernetes.io/instance": "([^"]+)"', text))
    assert instances == {mine}


def groups(workload: Workload) -> Any:
    return workload.service, workload.labels.get("tandem-model")


def test_what_is_one_models_selects_no_pod_of_another() -> None:
    manifests = side_by_side("tandem")
    found = workloads_of(manifests)
    assert len({groups(workload) for workload in found}) == len(found) == 4
    for manifest in manifests:
        if manifest["kind"] in ("NetworkPolicy", "ServiceMonitor"):
            # These are of all models.
            continue
        for selector in pod_selectors(manifest):
            assert sum(selects(selector, each.labels) for each in found) == 1
    for workload in found:
        for kind in ("PodDisruptionBudget", "ScaledObject", "HorizontalPodAutoscaler"):
            of_it = [
                m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == workload.name
            ]
            is_scaler = kind != "PodDisruptionBudget"
            is_drafter = workload.service == "drafter"
            expected = not is_scaler or is_drafter is (kind == "HorizontalPodAutoscaler")
            assert len(of_it) == expected


@pytest.mark.parametrize("namespace", ["tandem", "serving"])
def test_names_and_queries_are_of_the_releases_namespace(namespace: str) -> None:
    manifests = render(VARIANTS["all"], namespace=namespace)
    assert {m["metadata"]["namespace"] for m in manifests} == {namespace}
    certificates = [m["spec"] for m in manifests if m["kind"] == "Certificate"]
    for name in (name for each in certificates for name in each.get("dnsNames", ())):
        assert "." not in name or name.split(".")[1] == namespace
    queries = [
        trigger["metadata"]["query"]
        for m in manifests
        if m["kind"] == "ScaledObject"
        for trigger in m["spec"]["triggers"]
    ]
    assert len(queries) == 5
    for query in queries:
        selectors = re.findall(r"tandem_\w+(\{.*?\})?", query)
        assert selectors
        assert all(each.startswith(f'{{namespace="{namespace}",service="') for each in selectors)
