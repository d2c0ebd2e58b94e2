"""The chart, rendered by Helm's own engine, and look-ups in its manifests."""

import functools
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
CHART = DEPLOY / "chart"

helm_python = pytest.importorskip("helm_python")

Manifest = dict[str, Any]
Values = dict[str, Any]


def example(name: str, **values: Any) -> Values:
    """An example's values, and others over them."""
    read: Values = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return read | values


_SCALING = {"autoscaling": {"min": 2, "max": 4}}

#: Sets of values: the chart's own, the examples, and each feature on one of these.
VARIANTS: dict[str, Values] = {
    "dev": example("dev"),
    "gpu": {},
    "ha": {"highAvailability": True},
    "tensor-parallel": {"modelDefaults": {"gpus": 2, "config": {"kv_memory_fraction": 0.8}}},
    "two-models": example("two-models"),
    "mtls": example("dev", mtls=True),
    "autoscaling": {"modelDefaults": _SCALING, "gateway": _SCALING, "drafter": _SCALING},
    "gateway-api": example("dev", gatewayApi={"enabled": True, "envoyGateway": True}),
    "inference-pool": example("dev", gatewayApi={"enabled": True}, inferencePool={"enabled": True}),
    "callers": example("dev", networkPolicy={"orchestrators": True, "drafterClients": True}),
    "tracing": example("dev", tracing="http://collector.monitoring:4317"),
    "monitoring": example("dev", monitoring={"enabled": True, "labels": {"release": "prometheus"}}),
    "clients": example("dev", gateway={"clientsSecret": "tandem-clients"}),
    "canary": {"gateway": {"aliases": {"chat": {"model": 9, "organisation/new:1": 1}}}},
    "snapshots": example("dev", drafter={"snapshots": {"size": "1Gi"}}),
    "images": {
        "models": [
            {
                "name": "model",
                "weights": "oci://registry.example/qwen3-8b:1",
                "tokenizer": "oci://registry.example/qwen3-8b-tokenizer@sha256:" + 64 * "0",
            }
        ]
    },
    # They all go together.
    "all": example(
        "two-models",
        mtls=True,
        gateway={**_SCALING, "clientsSecret": "tandem-clients"},
        drafter=_SCALING,
        modelDefaults=_SCALING,
        tracing="http://collector.monitoring:4317",
        monitoring={"enabled": True},
        gatewayApi={"enabled": True},
        inferencePool={"enabled": True},
    ),
}

SERVICES = ("gateway", "drafter", "verifier")


def find_tool(name: str) -> str:
    """The path of a tool in this environment or on the machine; skips the test without it."""
    beside_python = Path(sys.executable).parent
    found = shutil.which(name, path=f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{name} is not installed (pip install -e '.[deploy]')")
    return found


@functools.cache
def _load() -> Any:
    return helm_python.Chart.load(CHART)


def render(
    values: Values, *, release: str = "tandem", namespace: str = "tandem"
) -> tuple[Manifest, ...]:
    """All manifests of a release.

    Raises:
        helm_python.HelmError: the values are refused.
    """
    files = _load().render(values, name=release, namespace=namespace)
    return tuple(
        manifest
        for path, text in sorted(files.items())
        if path.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    )


@functools.cache
def resolve(variant: str) -> tuple[Manifest, ...]:
    """All manifests of a variant."""
    return render(VARIANTS[variant])


def of_kind(variant: str, *kinds: str) -> Iterator[Manifest]:
    """The manifests of these kinds."""
    return (manifest for manifest in resolve(variant) if manifest["kind"] in kinds)


def named(variant: str, kind: str, name: str) -> Manifest:
    """The one manifest of this kind and name."""
    [found] = [m for m in of_kind(variant, kind) if m["metadata"]["name"] == name]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The workload of a service, of a verifier's model."""

    service: str
    manifest: Manifest
    template: Manifest

    @property
    def name(self) -> str:
        name: str = self.manifest["metadata"]["name"]
        return name

    @property
    def pod(self) -> Manifest:
        spec: Manifest = self.template["spec"]
        return spec

    @property
    def container(self) -> Manifest:
        [container] = self.pod["containers"]
        assert container["name"] == self.service
        return dict(container)

    @property
    def containers(self) -> list[Manifest]:
        return [*self.pod.get("initContainers", ()), *self.pod["containers"]]

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def container_ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def environment(self) -> Mapping[str, str]:
        return {variable["name"]: variable["value"] for variable in self.container["env"]}


def workloads_of(manifests: tuple[Manifest, ...]) -> list[Workload]:
    """The workloads: the gateway's, the drafter's, and of each model the verifiers'."""
    found = []
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            template = manifest["spec"]["template"]
            service = template["metadata"]["labels"]["app.kubernetes.io/component"]
            found.append(Workload(service=service, manifest=manifest, template=template))
    found.sort(key=lambda workload: SERVICES.index(workload.service))
    assert [workload.service for workload in found[:3]] == list(SERVICES)
    assert {workload.service for workload in found[3:]} <= {"verifier"}
    return found


def workloads(variant: str) -> list[Workload]:
    return workloads_of(resolve(variant))
