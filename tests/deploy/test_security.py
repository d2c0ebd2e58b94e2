"""No manifest uses root, host access or a writable root; policies admit needed traffic only."""

from typing import Any, NamedTuple

import pytest

from tests.deploy.manifests import VARIANTS, Workload, of_kind, resolve, workloads


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_are_restricted(variant: str) -> None:
    for workload in workloads(variant):
        pod = workload.pod
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["runAsGroup"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in workload.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert all("hostPort" not in port for port in container.get("ports", ()))
            for mount in container.get("volumeMounts", ()):
                templates = workload.manifest["spec"].get("volumeClaimTemplates", ())
                volumes = {volume["name"] for volume in pod["volumes"]}
                volumes |= {template["metadata"]["name"] for template in templates}
                assert mount["name"] in volumes
        for volume in pod["volumes"]:
            [kind] = set(volume) - {"name"}
            assert kind in ("emptyDir", "ephemeral", "image", "persistentVolumeClaim", "secret")
            assert kind != "emptyDir" or "sizeLimit" in volume["emptyDir"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rights_in_the_cluster_are_granted(variant: str) -> None:
    kinds = {manifest["kind"] for manifest in resolve(variant)}
    assert not {kind for kind in kinds if "Role" in kind or "Webhook" in kind}
    assert "Secret" not in kinds
    for manifest in of_kind(variant, "Service"):
        assert manifest["spec"].get("type", "ClusterIP") == "ClusterIP"
    for manifest in of_kind(variant, "ServiceAccount"):
        assert manifest["automountServiceAccountToken"] is False


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_workload_may_be_disrupted_one_pod_at_a_time(variant: str) -> None:
    budgets = [budget["spec"] for budget in of_kind(variant, "PodDisruptionBudget")]
    for workload in workloads(variant):
        [budget] = [
            budget
            for budget in budgets
            if budget["selector"]["matchLabels"].items() <= workload.labels.items()
        ]
        # `minAvailable: 1` would block draining a node with the only pod.
        assert budget == {
            "maxUnavailable": 1,
            # Else a verifier that loads would hold up a drain of its machine.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": budget["selector"],
        }


class Pod(NamedTuple):
    """A calling pod."""

    labels: dict[str, str]
    namespace: str = "tandem"
    namespace_labels: tuple[tuple[str, str], ...] = ()


CALLERS = {
    "stranger": Pod({"app": "other"}),
    "client": Pod({"tandem-client": "true"}),
    "remote client": Pod({}, "team", (("tandem-client", "true"),)),
    "orchestrator": Pod({"tandem-orchestrator": "true"}),
    "drafter client": Pod({"tandem-drafter-client": "true"}),
    "prometheus": Pod({"app.kubernetes.io/name": "prometheus"}, "monitoring"),
}


def admits(variant: str, caller: Pod, callee: Workload, port: str) -> bool:
    """Whether the callee's network policies admit the caller."""
    policies = [
        policy["spec"]
        for policy in of_kind(variant, "NetworkPolicy")
        if "Ingress" in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], callee.labels)
    ]
    if not policies:
        return True
    return any(
        any(is_peer(peer, caller) for peer in rule["from"])
        and port in [allowed["port"] for allowed in rule["ports"]]
        for policy in policies
        for rule in policy.get("ingress", ())
    )


def is_peer(peer: dict[str, Any], caller: Pod) -> bool:
    if "namespaceSelector" not in peer:
        return caller.namespace == "tandem" and selects(peer["podSelector"], caller.labels)
    labels = dict(caller.namespace_labels) | {"kubernetes.io/metadata.name": caller.namespace}
    return selects(peer["namespaceSelector"], labels) and selects(
        peer.get("podSelector", {}), caller.labels
    )


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert not set(selector) - {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_traffic_without_a_policy_is_denied_in_both_directions(variant: str) -> None:
    denials = [
        policy["spec"]
        for policy in of_kind(variant, "NetworkPolicy")
        if not {"ingress", "egress"} & set(policy["spec"])
    ]
    for workload in workloads(variant):
        denied = {
            way
            for policy in denials
            if selects(policy["podSelector"], workload.labels)
            for way in policy["policyTypes"]
        }
        assert denied == {"Ingress", "Egress"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_needed_callers_are_admitted(variant: str) -> None:
    expected = {
        ("client", "gateway", "grpc"),
        ("client", "gateway", "http"),
        ("remote client", "gateway", "grpc"),
        ("remote client", "gateway", "http"),
        ("gateway", "verifier", "grpc"),
        ("gateway", "drafter", "grpc"),
        ("verifier", "drafter", "grpc"),
        *(("prometheus", service, "metrics") for service in ("gateway", "drafter", "verifier")),
    }
    if variant == "callers":
        expected.add(("orchestrator", "verifier", "grpc"))
        expected.add(("drafter client", "drafter", "grpc"))
    callees = workloads(variant)
    callers = CALLERS | {workload.service: Pod(workload.labels) for workload in callees}
    for callee in callees:
        for port in ("grpc", "http", "metrics", "health"):
            for name, caller in callers.items():
                is_expected = (name, callee.service, port) in expected
                assert admits(variant, caller, callee, port) is is_expected, (
                    name,
                    callee.service,
                    port,
                )


@pytest.mark.parametrize("variant", VARIANTS)
def test_services_may_call_only_their_peers_and_the_clusters_dns(variant: str) -> None:
    # OpenShift's own serve in a namespace and at a port of their own.
    dns = {
        (namespace, port) for namespace in ("kube-system", "openshift-dns") for port in (53, 5353)
    }
    expected = {
        "gateway": {("verifier", "grpc"), ("drafter", "grpc"), *dns},
        "verifier": {("drafter", "grpc"), *dns},
    }
    for workload in workloads(variant):
        called = {
            (called_name(peer), port["port"])
            for policy in of_kind(variant, "NetworkPolicy")
            if "Egress" in policy["spec"]["policyTypes"]
            and selects(policy["spec"]["podSelector"], workload.labels)
            for rule in policy["spec"].get("egress", ())
            for peer in rule["to"]
            # Downloads, of which another test knows.
            if "ipBlock" not in peer
            for port in rule["ports"]
        }
        # The port of OTLP over gRPC.
        is_traced = "tracing" in VARIANTS[variant]
        collector = {("opentelemetry-collector", 4317), *dns} if is_traced else set()
        assert called == expected.get(workload.service, set()) | collector


def called_name(peer: dict[str, Any]) -> str:
    """The component or the name that the peer's labels require, or the namespace of any pod."""
    namespace = peer.get("namespaceSelector", {}).get("matchLabels", {})
    pod = peer.get("podSelector", {}).get("matchLabels", {})
    name = pod.get("app.kubernetes.io/component") or pod.get("app.kubernetes.io/name")
    assert bool(name) is not bool(namespace)
    return str(name or namespace["kubernetes.io/metadata.name"])
