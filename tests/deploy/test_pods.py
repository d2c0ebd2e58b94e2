"""The built images and the pods of the example `dev`, run by podman: `make test-deploy`.

podman plays the manifests unchanged except for what it lacks: a StatefulSet becomes its pod, the
cluster's DNS becomes hostAliases, and volumes, which are the machine's there, get separate names.
The test makes the gRPC probes, which podman does not support.
"""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from servicekit import probe
from servicekit.serving.health import LIVENESS_NAME
from tandem.client import Finished, GenerationRequest, SpeculationParams, TandemClient
from tests.deploy.manifests import SERVICES, Workload, workloads

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("TANDEM_TEST_DEPLOY"),
        reason="builds and runs images for many minutes: make test-deploy",
    ),
    pytest.mark.timeout(1200),
]

NETWORK = "tandem-test"
SUBNET = "10.89.77.0/24"
ADDRESSES = {"gateway": "10.89.77.10", "drafter": "10.89.77.11", "verifier": "10.89.77.12"}
NAMES = {
    "drafter": ["tandem-drafter"],
    "verifier": ["tandem-verifier-renamer"],
    "gateway": ["tandem-gateway"],
}

# Compiling and loading, on a busy machine.
START_TIMEOUT_S = 600.0

# cgroupfs and log files, since there is no systemd; limits that any container may set.
CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


class Podman:
    """Runs podman on a machine without engine and systemd."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("podman") is None or shutil.which("runc") is None:
            pytest.skip("podman and runc are not installed: make test-deploy, as root")
        if os.geteuid() != 0:
            pytest.skip("podman needs root here")
        configuration = folder / "containers.conf"
        configuration.write_text(CONTAINERS_CONF)
        self._environ = os.environ | {
            "CONTAINERS_CONF": str(configuration),
            "STORAGE_DRIVER": os.environ.get("STORAGE_DRIVER", "vfs"),
        }

    def __call__(self, *arguments: str, timeout_s: float = 120.0) -> str:
        done = self.tried(*arguments, timeout_s=timeout_s)
        assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def tried(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["podman", *arguments],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def pod_name(service: str) -> str:
    return f"tandem-{service}-0"


def container_name(service: str) -> str:
    return f"{pod_name(service)}-{service}"


def playable(workload: Workload) -> str:
    """The manifests of one service's pod, for `podman kube play`."""
    spec: dict[str, Any] = json.loads(json.dumps(workload.pod))
    spec["hostAliases"] = [
        {"ip": ADDRESSES[service], "hostnames": names} for service, names in NAMES.items()
    ]
    # podman would restart an init container forever.
    spec["restartPolicy"] = "Never"
    for item in [
        *spec["volumes"],
        *(mount for c in workload_containers(spec) for mount in c["volumeMounts"]),
    ]:
        item["name"] = f"tandem-test-{workload.service}-{item['name']}"
    metadata = {
        "name": pod_name(workload.service),
        "labels": workload.labels,
        "annotations": {"io.podman.annotations.init.container.type": "always"},
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return yaml.safe_dump(pod)


def workload_containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def remove_all(podman: Podman) -> None:
    for service in SERVICES:
        podman.tried("pod", "rm", "--force", "--time", "1", pod_name(service))
        for volume in ("tmp", "model", "model-renamer"):
            podman.tried("volume", "rm", "--force", f"tandem-test-{service}-{volume}")
    podman.tried("network", "rm", "--force", NETWORK)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """All pods, serving."""
    folder = tmp_path_factory.mktemp("podman")
    podman = Podman(folder)
    for image in (*SERVICES, "demo-model"):
        if podman.tried("image", "exists", f"localhost/tandem-{image}:dev").returncode:
            pytest.skip(f"tandem-{image}:dev is not built: make test-deploy")
    remove_all(podman)
    try:
        podman("network", "create", "--subnet", SUBNET, NETWORK)
        for workload in workloads("dev"):
            manifest = folder / f"{workload.service}.yaml"
            manifest.write_text(playable(workload))
            address = ADDRESSES[workload.service]
            podman("kube", "play", "--network", NETWORK, "--ip", address, str(manifest))
        for workload in workloads("dev"):
            await_serving(podman, workload)
        yield podman
    finally:
        remove_all(podman)


def await_serving(podman: Podman, workload: Workload) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while asked(workload, "readinessProbe") != 0:
        state = podman("inspect", "--format", "{{.State.Status}}", container_name(workload.service))
        logs = podman.tried("logs", container_name(workload.service))
        assert state.strip() == "running", logs.stdout + logs.stderr
        assert time.monotonic() < deadline_s, logs.stdout + logs.stderr
        time.sleep(1)


def asked(workload: Workload, name: str) -> int:
    """The exit code of a manifest's probe, made from outside the pod."""
    asks = workload.container[name]["grpc"]
    address = f"{ADDRESSES[workload.service]}:{asks['port']}"
    return probe.main([address, "--service", asks.get("service", ""), "--timeout-s", "5"])


def by_service(service: str) -> Workload:
    return workloads("dev")[SERVICES.index(service)]


def scraped(service: str) -> list[str]:
    """The lines of a pod's metrics."""
    port = by_service(service).container_ports["metrics"]
    # Without the environment's proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{ADDRESSES[service]}:{port}/metrics", timeout=10) as response:
        text: str = response.read().decode()
        return text.splitlines()


@pytest.mark.parametrize("service", SERVICES)
def test_the_images_own_health_check_passes(podman: Podman, service: str) -> None:
    image = json.loads(podman("image", "inspect", f"localhost/tandem-{service}:dev"))[0]
    command = image["Healthcheck"]["Test"]
    assert command[0] == "CMD"
    assert LIVENESS_NAME in command
    podman("exec", container_name(service), *command[1:])


@pytest.mark.parametrize("service", SERVICES)
def test_containers_run_as_nobody_on_a_read_only_root(podman: Podman, service: str) -> None:
    found = json.loads(podman("inspect", container_name(service)))[0]
    assert found["HostConfig"]["ReadonlyRootfs"] is True
    assert not found["EffectiveCaps"]
    assert found["HostConfig"]["Memory"] > 0
    name = container_name(service)
    assert podman("exec", name, "id", "-u").strip() == "65532"
    for path in ("/probe", "/opt/tandem/app/probe", "/etc/probe"):
        assert podman.tried("exec", name, "touch", path).returncode != 0
    podman("exec", name, "touch", "/tmp/probe")


@pytest.mark.parametrize("service", SERVICES)
def test_images_hold_no_compiler_no_pip_no_tests_and_no_other_service(
    podman: Podman, service: str
) -> None:
    name = container_name(service)
    assert set(podman("exec", name, "ls", "/opt/tandem/app").split()) == {
        "tandem",
        "servicekit",
        service,
    }
    patterns = ("gcc*", "cc", "c++", "g++*", "clang*", "ld", "as", "pip*")
    for folder in ("/opt/tandem/bin", "/usr/bin", "/usr/local/bin", "/bin"):
        found = podman("exec", name, "sh", "-c", f"ls {folder} 2>/dev/null || true").split()
        assert not [f for f in found for pattern in patterns if Path(f).match(pattern)]
    environment = "/opt/tandem/lib"
    for kind in ("tests", "pip"):
        assert not podman("exec", name, "find", environment, "-type", "d", "-name", kind)


@pytest.mark.parametrize("service", ["gateway", "verifier"])
def test_images_of_services_that_read_models_can_download_them(
    podman: Podman, service: str
) -> None:
    name = container_name(service)
    assert "--local-dir" in podman("exec", name, "hf", "download", "--help")
    podman("exec", name, "flock", "--version")


def test_requests_are_answered_with_and_without_speculation(podman: Podman) -> None:
    prompt = "def add(first, second):\n    return first + second\n\n\ndef add("
    with TandemClient(f"{ADDRESSES['gateway']}:50050") as client:
        drafted, plain = (
            client.generate(
                GenerationRequest(
                    prompt=prompt, max_new_tokens=24, speculation=SpeculationParams(enabled=enabled)
                )
            )
            for enabled in (True, False)
        )
    assert drafted.token_ids == plain.token_ids
    assert len(drafted.token_ids) > 1


def test_the_verifier_reaches_the_drafter_once_a_request_needs_it(podman: Podman) -> None:
    with TandemClient(f"{ADDRESSES['gateway']}:50050") as client:
        client.generate(GenerationRequest(prompt="def add(", max_new_tokens=8, ignore_eos=True))
    deadline_s = time.monotonic() + START_TIMEOUT_S
    connected = re.compile(r'tandem_verifier_drafters{.*state="up".*} 1\.0')
    while not any(map(connected.fullmatch, scraped("verifier"))):
        logs = podman.tried("logs", container_name("verifier"))
        assert time.monotonic() < deadline_s, logs.stdout + logs.stderr
        time.sleep(1)


def test_a_stopped_pod_finishes_its_requests_and_ends_by_itself(podman: Podman) -> None:
    """Runs last: it ends the pods."""
    with TandemClient(f"{ADDRESSES['gateway']}:50050") as client:
        request = GenerationRequest(prompt="def add(", max_new_tokens=200, ignore_eos=True)
        events = client.stream(request)
        seen = [next(events), next(events)]
        with ThreadPoolExecutor(1) as threads:
            stopping = threads.submit(
                podman, "stop", "--time", "140", container_name("gateway"), timeout_s=200.0
            )
            seen += list(events)
            stopping.result()
    assert isinstance(seen[-1], Finished)
    podman("stop", "--time", "140", container_name("verifier"), timeout_s=200.0)
    podman("stop", "--time", "30", container_name("drafter"), timeout_s=60.0)
    for service in SERVICES:
        # Killed: 137.
        state = podman("inspect", "--format", "{{.State.ExitCode}}", container_name(service))
        assert state.strip() == "0", service
