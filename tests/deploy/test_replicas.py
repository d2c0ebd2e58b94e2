"""Replicas are spread over machines; with high availability, any one may be lost."""

from typing import Any

import pytest

from tests.deploy.manifests import (
    REPOSITORY,
    VARIANTS,
    Workload,
    of_kind,
    render,
    workloads,
    workloads_of,
)

# GPU feature discovery sets it.
GPU_LABEL = "nvidia.com/gpu.present"
MACHINE, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"


def spread(workload: Workload) -> dict[str, dict[str, Any]]:
    constraints = workload.pod["topologySpreadConstraints"]
    return {constraint["topologyKey"]: constraint for constraint in constraints}


@pytest.mark.parametrize("variant", VARIANTS)
def test_replicas_are_spread_over_machines_and_zones(variant: str) -> None:
    revisions = {
        "Deployment": ["pod-template-hash"],
        "StatefulSet": ["controller-revision-hash"],
    }
    for workload in workloads(variant):
        found = spread(workload)
        assert found.keys() == {MACHINE, ZONE}
        for constraint in found.values():
            assert constraint["maxSkew"] == 1
            # Counts the pods of this service, and in a rollout only the new ones.
            selector = constraint["labelSelector"]["matchLabels"]
            assert selector["app.kubernetes.io/component"] == workload.service
            assert selector.get("tandem-model") == workload.labels.get("tandem-model")
            assert selector.items() <= workload.labels.items()
            assert constraint.get("matchLabelKeys") == revisions[workload.manifest["kind"]]
        # Whatever the zones, a pod may start.
        assert found[ZONE]["whenUnsatisfiable"] == "ScheduleAnyway"


def budgets(variant: str, workload: Workload) -> list[dict[str, Any]]:
    return [
        budget["spec"]
        for budget in of_kind(variant, "PodDisruptionBudget")
        if budget["spec"]["selector"]["matchLabels"].items() <= workload.labels.items()
    ]


@pytest.mark.parametrize("variant", ["ha", "two-models"])
def test_with_high_availability_no_machine_holds_all_of_a_service(variant: str) -> None:
    for workload in workloads(variant):
        # Those that are scaled have their own least number.
        replicas = workload.manifest["spec"].get("replicas", 2)
        assert replicas >= 2
        constraint = spread(workload)[MACHINE]
        # With one machine, the second pod waits for another.
        assert constraint["whenUnsatisfiable"] == "DoNotSchedule"
        assert constraint["minDomains"] == 2
        # A drained machine, or one of the control plane, counts for nothing.
        assert constraint["nodeTaintsPolicy"] == "Honor"
        assert "affinity" not in workload.pod
        [budget] = budgets(variant, workload)
        assert budget["maxUnavailable"] < replicas


@pytest.mark.parametrize("variant", ["ha", "two-models"])
def test_with_high_availability_every_machine_that_counts_can_have_a_verifier(variant: str) -> None:
    # One that counts and cannot stays at none, and keeps each of the others at `maxSkew`.
    [*others, verifier] = workloads(variant)
    assert verifier.pod["nodeSelector"] == {GPU_LABEL: "true"}
    assert spread(verifier)[MACHINE].get("nodeAffinityPolicy", "Honor") == "Honor"
    assert all("nodeSelector" not in workload.pod for workload in others[:2])
    assert GPU_LABEL in (REPOSITORY / "docs/deploy.md").read_text()


def test_values_say_on_which_machines_pods_run() -> None:
    nodes = {"pool": "models"}
    toleration = {"key": "pool", "operator": "Exists"}
    chosen = {"nodeSelector": nodes, "tolerations": [toleration], "priorityClassName": "high"}
    values = {"highAvailability": True, "modelDefaults": chosen, "gateway": chosen}
    [gateway, drafter, verifier] = workloads_of(render(values))
    for workload in (gateway, verifier):
        assert workload.pod["nodeSelector"] == nodes
        assert toleration in workload.pod["tolerations"]
        assert workload.pod["priorityClassName"] == "high"
    assert not {"nodeSelector", "tolerations", "priorityClassName"} & drafter.pod.keys()


def test_a_gpu_is_asked_for_by_its_resource_alone() -> None:
    # Labels of nodes depend on what else is installed in the cluster.
    pod = workloads("gpu")[2].pod
    assert "nodeSelector" not in pod
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] >= 1
