"""Autoscalers ask for metrics that exist, of their own pods, and act before anything is refused."""

import re
from typing import Any

import pytest

from tests.deploy.manifests import VARIANTS, named, of_kind, render, resolve, workloads
from tests.deploy.monitoring import metric_names
from tests.deploy.monitoring.test_rules import cluster_job
from tests.deploy.test_manifests_match_code import configuration

SCALED = ["autoscaling", "all"]


def exported_metrics() -> set[str]:
    """The names of the series that the services export without TLS, before the first request."""
    after = (
        "tandem_certificate_",
        "tandem_file_",
        "tandem_rpc_",
        "tandem_spec_decode_num_accepted_tokens_per_pos",
    )
    return {name for name in metric_names.exported() if not name.startswith(after)}


def triggers(scaled: Any) -> list[dict[str, str]]:
    return [trigger["metadata"] for trigger in scaled["spec"]["triggers"]]


@pytest.mark.parametrize("variant", SCALED)
def test_they_use_exported_metrics(variant: str) -> None:
    queries = [one["query"] for each in of_kind(variant, "ScaledObject") for one in triggers(each)]
    [hpa] = of_kind(variant, "HorizontalPodAutoscaler")
    kinds = {metric["type"]: metric for metric in hpa["spec"]["metrics"]}
    assert kinds["Resource"]["resource"]["name"] == "cpu"
    queries.append(kinds["Pods"]["pods"]["metric"]["name"])
    queried = {name for query in queries for name in re.findall(r"tandem_\w+", query)}
    assert queried >= {
        "tandem_verifier_sequences_running",
        "tandem_verifier_sequences_waiting",
        "tandem_kv_blocks_used",
        "tandem_drafter_history_bytes",
    }
    assert queried <= exported_metrics()


@pytest.mark.parametrize("variant", SCALED)
def test_each_workload_has_one_that_alone_sets_its_replicas(variant: str) -> None:
    scaled = [
        (each["spec"]["scaleTargetRef"]["kind"], each["spec"]["scaleTargetRef"]["name"])
        for each in of_kind(variant, "ScaledObject", "HorizontalPodAutoscaler")
    ]
    targets = [(each.manifest["kind"], each.name) for each in workloads(variant)]
    assert sorted(scaled) == sorted(targets)
    for manifest in resolve(variant):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            assert "replicas" not in manifest["spec"], "it would undo the autoscaler's work"


@pytest.mark.parametrize("variant", SCALED)
def test_they_scale_before_requests_are_shed(variant: str) -> None:
    [caller, drafters, *verifiers] = workloads(variant)

    def total(workload: Any, *metrics: str) -> str:
        chosen = f'{{namespace="tandem",service="{workload.name}"}}'
        return " + ".join(f"sum(tandem_{metric}{chosen})" for metric in metrics)

    for verifier in verifiers:
        config = configuration(verifier)
        limits = triggers(named(variant, "ScaledObject", verifier.name))
        thresholds = {one["query"]: float(one["threshold"]) for one in limits}
        busy = total(verifier, "verifier_sequences_running", "verifier_sequences_waiting")
        # Whatever the verifiers' flag, of which this is a percentage.
        most = total(verifier, "verifier_max_num_seqs").replace("sum", "avg")
        assert 50 < thresholds[f"100 * ({busy}) / {most}"] < 100
        assert config.max_num_seqs < config.max_num_waiting / 2
        used, blocks = (total(verifier, f"kv_blocks_{each}") for each in ("used", "total"))
        assert 50 < thresholds[f"100 * {used} / {blocks}"] < 100
        # Where Prometheus does not answer, nothing is scaled down.
        assert {one["ignoreNullValues"] for one in limits} == {"false"}
    [open_streams] = triggers(named(variant, "ScaledObject", caller.name))
    assert open_streams["query"] == total(caller, "num_requests_running", "num_requests_waiting")
    assert float(open_streams["threshold"]) < configuration(caller).max_concurrent_requests / 2
    assert open_streams["ignoreNullValues"] == "false"
    [hpa] = of_kind(variant, "HorizontalPodAutoscaler")
    [pods] = [m for m in hpa["spec"]["metrics"] if m["type"] == "Pods"]
    evicts = configuration(drafters).max_history_bytes
    assert evicts / 2 < int(pods["pods"]["target"]["averageValue"]) < evicts


@pytest.mark.parametrize("variant", SCALED)
def test_without_the_operator_series_have_the_service_that_autoscalers_ask_for(
    variant: str,
) -> None:
    [rule] = [r for r in cluster_job()["relabel_configs"] if r.get("target_label") == "service"]
    prefix = "__meta_kubernetes_pod_label_"
    for workload in workloads(variant):
        labels = {prefix + re.sub(r"\W", "_", name): text for name, text in workload.labels.items()}
        joined = rule["separator"].join(labels.get(name, "") for name in rule["source_labels"])
        found = re.fullmatch(rule["regex"], joined)
        assert found is not None
        assert found[1] == workload.name


def test_the_bytes_at_which_drafters_are_added_follow_their_limit() -> None:
    values = VARIANTS["autoscaling"] | {
        "drafter": {"autoscaling": {"min": 2, "max": 4}, "config": {"max_history_bytes": 4000}}
    }
    [hpa] = [each for each in render(values) if each["kind"] == "HorizontalPodAutoscaler"]
    [pods] = [m for m in hpa["spec"]["metrics"] if m["type"] == "Pods"]
    assert pods["pods"]["target"]["averageValue"] == "3000"


@pytest.mark.parametrize("variant", SCALED)
def test_drafters_are_added_before_one_event_loop_is_busy(variant: str) -> None:
    [hpa] = of_kind(variant, "HorizontalPodAutoscaler")
    [cpu] = [m["resource"] for m in hpa["spec"]["metrics"] if m["type"] == "Resource"]
    requested = workloads(variant)[1].container["resources"]["requests"]["cpu"]
    cores = float(requested.removesuffix("m")) / (1000 if requested.endswith("m") else 1)
    # The autoscaler does nothing within a tenth of its target.
    assert cores * cpu["target"]["averageUtilization"] / 100 * 1.1 < 0.9
