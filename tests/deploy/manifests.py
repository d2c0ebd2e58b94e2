"""The kustomizations, resolved by kubectl, and look-ups in their manifests."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"

Manifest = dict[str, Any]

#: Every kustomization: overlays alone, and each component on its overlay.
VARIANTS = {
    "dev": ("dev",),
    "gpu": ("gpu",),
    "ha": ("ha",),
    "dev+mtls": ("dev", "mtls"),
    "dev+keda": ("dev", "keda"),
    "dev+hpa": ("dev", "hpa"),
    "dev+gateway-api": ("dev", "gateway-api"),
    "dev+orchestrator": ("dev", "orchestrator"),
    "dev+drafter-clients": ("dev", "drafter-clients"),
    "dev+tracing": ("dev", "tracing"),
    "dev+monitoring": ("dev", "monitoring"),
    "gpu+tensor-parallel": ("gpu", "tensor-parallel"),
    "gpu+model-loader": ("gpu", "model-loader"),
    # They all go together.
    "all": ("ha", *sorted(folder.name for folder in DEPLOY.glob("components/*"))),
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
def resolve(variant: str) -> tuple[Manifest, ...]:
    """All manifests of a variant, as `kubectl kustomize` prints them."""
    overlay, *components = VARIANTS[variant]
    # Relative, since kustomize accepts no absolute paths.
    with tempfile.TemporaryDirectory() as scratch:
        root = os.path.relpath(DEPLOY, Path(scratch).resolve())
        write_kustomization(
            Path(scratch),
            resources=[f"{root}/overlays/{overlay}"],
            components=[f"{root}/components/{component}" for component in components],
        )
        return kustomize(Path(scratch))


def resolve_in_namespace(variant: str, namespace: str) -> tuple[Manifest, ...]:
    """A variant in another namespace, in the two layers that docs/deploy.md asks for."""
    overlay, *components = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as scratch:
        root = os.path.relpath(DEPLOY, Path(scratch).resolve())
        write_kustomization(
            Path(scratch) / "services",
            namespace=namespace,
            resources=[f"../{root}/overlays/{overlay}"],
        )
        write_kustomization(
            Path(scratch),
            namespace=namespace,
            resources=["services"],
            components=[f"{root}/components/{component}" for component in components],
        )
        return kustomize(Path(scratch))


def write_kustomization(folder: Path, *, namespace: str = "tandem", **fields: list[Any]) -> None:
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        **fields,
    }
    folder.mkdir(exist_ok=True)
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))


def kustomize(folder: Path) -> tuple[Manifest, ...]:
    kubectl = find_tool("kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "kustomize warns"
    return tuple(manifest for manifest in yaml.safe_load_all(done.stdout) if manifest)


def of_kind(variant: str, *kinds: str) -> Iterator[Manifest]:
    """The manifests of these kinds."""
    return (manifest for manifest in resolve(variant) if manifest["kind"] in kinds)


def named(variant: str, kind: str, name: str) -> Manifest:
    """The one manifest of this kind and name."""
    [found] = [m for m in of_kind(variant, kind) if m["metadata"]["name"] == name]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The workload of one service."""

    service: str
    manifest: Manifest
    template: Manifest

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


def workloads(variant: str) -> list[Workload]:
    """The three services' workloads, in the order of `SERVICES`."""
    found = {}
    for manifest in of_kind(variant, "Deployment", "StatefulSet"):
        template = manifest["spec"]["template"]
        service = template["metadata"]["labels"]["app.kubernetes.io/component"]
        assert service not in found, "two workloads of one service"
        found[service] = Workload(service=service, manifest=manifest, template=template)
    assert set(found) == set(SERVICES)
    return [found[service] for service in SERVICES]


def environment(variant: str, workload: Workload) -> Mapping[str, str]:
    """The container's variables from ConfigMaps."""
    variables: dict[str, str] = {}
    for source in workload.container["envFrom"]:
        variables |= named(variant, "ConfigMap", source["configMapRef"]["name"])["data"]
    assert "env" not in workload.container
    return variables
