"""Replicas are spread over machines; overlays/ha survives the loss of any one."""

from typing import Any

import pytest

from tests.deploy.manifests import (
    REPOSITORY,
    VARIANTS,
    Workload,
    of_kind,
    workloads,
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
            assert selector.items() <= workload.labels.items()
            assert constraint.get("matchLabelKeys") == revisions[workload.manifest["kind"]]
        # Whatever the zones, a pod may start.
        assert found[ZONE]["whenUnsatisfiable"] == "ScheduleAnyway"


def test_with_high_availability_no_machine_holds_all_of_a_service() -> None:
    for workload in workloads("ha"):
        replicas = workload.manifest["spec"]["replicas"]
        assert replicas >= 2
        constraint = spread(workload)[MACHINE]
        # With one machine, the second pod waits for another.
        assert constraint["whenUnsatisfiable"] == "DoNotSchedule"
        assert constraint["minDomains"] == 2
        # A drained machine, or one of the control plane, counts for nothing.
        assert constraint["nodeTaintsPolicy"] == "Honor"
        assert "affinity" not in workload.pod
        [budget] = [
            budget["spec"]
            for budget in of_kind("ha", "PodDisruptionBudget")
            if budget["spec"]["selector"]["matchLabels"].items() <= workload.labels.items()
        ]
        assert budget["maxUnavailable"] < replicas


def test_with_high_availability_every_machine_that_counts_can_have_a_verifier() -> None:
    # One that counts and cannot stays at none, and keeps each of the others at `maxSkew`.
    pod = workloads("ha")[2].pod
    assert pod["nodeSelector"] == {GPU_LABEL: "true"}
    assert spread(workloads("ha")[2])[MACHINE].get("nodeAffinityPolicy", "Honor") == "Honor"
    assert all("nodeSelector" not in workload.pod for workload in workloads("ha")[:2])
    assert GPU_LABEL in (REPOSITORY / "docs/deploy.md").read_text()


def test_elsewhere_one_machine_is_enough() -> None:
    for variant in ("dev", "gpu"):
        for workload in workloads(variant):
            assert spread(workload)[MACHINE]["whenUnsatisfiable"] == "ScheduleAnyway"


def test_autoscalers_keep_two_of_each() -> None:
    for scaler in of_kind("all", "ScaledObject", "HorizontalPodAutoscaler"):
        spec = scaler["spec"]
        assert spec.get("minReplicaCount", spec.get("minReplicas")) >= 2


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.startswith("gpu")])
def test_a_gpu_is_asked_for_by_its_resource_alone(variant: str) -> None:
    # Labels of nodes depend on what else is installed in the cluster.
    pod = workloads(variant)[2].pod
    assert "nodeSelector" not in pod
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] >= 1
