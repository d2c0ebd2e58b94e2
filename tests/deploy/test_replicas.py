"""Replicas are spread over machines; overlays/ha survives the loss of any one."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import (
    DEPLOY,
    REPOSITORY,
    VARIANTS,
    Workload,
    kustomize,
    of_kind,
    workloads,
    write_kustomization,
)

MACHINE, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of a cluster.

    Attributes:
        room: for how many pods of the service: its processors, memory, GPUs.
        tainted: with a taint that the service's pods do not tolerate.
    """

    room: int
    tainted: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


def place(pod: Mapping[str, Any], replicas: int, nodes: Sequence[Node]) -> list[int]:
    """How many of a service's pods each node gets; the rest waits.

    By the scheduler's documented rule for DoNotSchedule: a pod goes where its node then has at most
    `maxSkew` pods more than the eligible node with the fewest, which has 0 if there are fewer than
    `minDomains` (1). A node is eligible if the pod's nodeSelector selects it, and, only with
    `nodeTaintsPolicy: Honor`, if the pod tolerates its taints; whether it has room never matters.
    """
    [constraint] = [
        one
        for one in pod["topologySpreadConstraints"]
        if one["whenUnsatisfiable"] != "ScheduleAnyway"
    ]
    assert constraint["topologyKey"] == MACHINE
    assert "affinity" not in pod
    selected = [pod.get("nodeSelector", {}).items() <= node.labels.items() for node in nodes]
    honors_taints = constraint.get("nodeTaintsPolicy", "Ignore") == "Honor"
    eligible = [
        i for i, node in enumerate(nodes) if selected[i] and not (honors_taints and node.tainted)
    ]
    held = [0] * len(nodes)
    for _ in range(replicas):
        is_short = len(eligible) < constraint.get("minDomains", 1)
        fewest = 0 if is_short else min(held[i] for i in eligible)
        for i, node in enumerate(nodes):
            may_run = selected[i] and not node.tainted and held[i] < node.room
            if may_run and held[i] + 1 - fewest <= constraint["maxSkew"]:
                held[i] += 1
                break
    return held


def spread(workload: Workload) -> dict[str, dict[str, Any]]:
    constraints = workload.pod["topologySpreadConstraints"]
    return {constraint["topologyKey"]: constraint for constraint in constraints}


@pytest.mark.parametrize("variant", VARIANTS)
def test_replicas_are_spread_over_machines_and_zones(variant: str) -> None:
    revisions = {
        "Deployment": ["pod-template-hash"],
        "StatefulSet": ["controller-revision-hash"],
        "LeaderWorkerSet": None,
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
        # With one machine, the second pod waits for another; so does one whose machine is drained.
        assert place(workload.pod, replicas, [Node(room=8)]) == [1]
        drained = Node(room=8, tainted=True)
        assert place(workload.pod, replicas, [Node(room=8), drained]) == [1, 0]
        assert place(workload.pod, replicas, [Node(room=8), Node(room=8)]) == [1, 1]
        [budget] = [
            budget["spec"]
            for budget in of_kind("ha", "PodDisruptionBudget")
            if budget["spec"]["selector"]["matchLabels"].items() <= workload.labels.items()
        ]
        assert budget["maxUnavailable"] < replicas


def test_with_high_availability_machines_that_are_tainted_do_not_limit_others() -> None:
    control_plane = Node(room=8, tainted=True)
    for workload in workloads("ha"):
        assert place(workload.pod, 4, [control_plane, Node(room=8), Node(room=8)]) == [0, 2, 2]


def test_with_the_documented_selector_machines_without_gpus_do_not_limit_others(
    tmp_path: Path,
) -> None:
    [patches] = [
        yaml.safe_load(block)
        for block in re.findall(
            r"```yaml\n(.*?)```", (REPOSITORY / "docs/deploy.md").read_text(), re.DOTALL
        )
        if "nodeSelector" in block
    ]
    root = os.path.relpath(DEPLOY, tmp_path.resolve())
    write_kustomization(tmp_path, resources=[f"{root}/overlays/ha"], **patches)
    [pod] = [
        manifest["spec"]["template"]["spec"]
        for manifest in kustomize(tmp_path)
        if manifest["kind"] == "Deployment" and manifest["metadata"]["name"] == "tandem-verifier"
    ]
    without_gpu = Node(room=0)
    with_gpus = Node(room=8, labels=pod["nodeSelector"])
    assert place(pod, 4, [without_gpu, with_gpus, with_gpus]) == [0, 2, 2]


def test_elsewhere_one_machine_is_enough() -> None:
    for variant in ("dev", "gpu"):
        for workload in workloads(variant):
            assert spread(workload)[MACHINE]["whenUnsatisfiable"] == "ScheduleAnyway"


def test_autoscalers_keep_two_of_each() -> None:
    for scaler in of_kind("ha+mtls+keda+hpa", "ScaledObject", "HorizontalPodAutoscaler"):
        spec = scaler["spec"]
        assert spec.get("minReplicaCount", spec.get("minReplicas")) >= 2


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.startswith("gpu")])
def test_a_gpu_is_asked_for_by_its_resource_alone(variant: str) -> None:
    # Labels of nodes depend on what else is installed in the cluster.
    pod = workloads(variant)[2].pod
    assert "nodeSelector" not in pod
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] >= 1
