"""The manifests agree with the services' code.

The services' own loader reads the configuration; names of health services and metrics come from the
code. A manifest that disagrees fails here and not in a cluster.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

import pydantic
import pytest
import yaml
from prometheus_client import CollectorRegistry
from starlette.routing import Route

import drafter.config
import drafter.service
import gateway.api.grpc_service
import gateway.config
import verifier.config
import verifier.server
from gateway.api.http import make_application
from gateway.api.openai.service import OpenAiApi
from servicekit.address import parse_address
from servicekit.channels.tls import channel_credentials
from servicekit.config import list_options, parse_config
from servicekit.serving import health
from servicekit.serving.health import LIVENESS_NAME
from tests.deploy.manifests import (
    REPOSITORY,
    VARIANTS,
    Workload,
    environment,
    named,
    of_kind,
    resolve,
    resolve_in_namespace,
    workloads,
)
from tests.deploy.monitoring import metric_names
from verifier.drafters.addresses import AdmittedDrafters
from verifier.service.watchdog import CHECKS_PER_TIMEOUT


class Code(NamedTuple):
    config: type[pydantic.BaseModel]
    health_name: str


CODE = {
    "gateway": Code(gateway.config.GatewayConfig, gateway.api.grpc_service.SERVICE_NAME),
    "drafter": Code(drafter.config.DrafterConfig, drafter.service.SERVICE_NAME),
    "verifier": Code(verifier.config.VerifierConfig, verifier.server.SERVICE_NAME),
}

# Time for the process to end after its drain.
END_S = 5
# CoreDNS as most installers configure it.
DNS_CACHE_S = 30


def arguments(workload: Workload) -> list[str]:
    """The service's own flags: those after `-m SERVICE`, or all arguments."""
    command = [*workload.container.get("command", ()), *workload.container.get("args", ())]
    for i, word in enumerate(command):
        if command[i - 1 : i + 1] == ["-m", workload.service]:
            return command[i + 1 :]
        assert word != workload.service
    return command


def configuration(variant: str, workload: Workload) -> Any:
    flags = arguments(workload)
    config = CODE[workload.service].config
    return parse_config(
        config, service=workload.service, argv=flags, environ=environment(variant, workload)
    )


def port_of(address: str | None) -> int:
    assert address is not None
    return parse_address(address).port


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variable_is_a_flag_of_its_service(variant: str) -> None:
    for workload in workloads(variant):
        known = {
            option.variable
            for option in list_options(CODE[workload.service].config, service=workload.service)
        }
        # The loader ignores unknown variables.
        assert set(environment(variant, workload)) <= known


@pytest.mark.parametrize("variant", VARIANTS)
def test_ports_are_those_of_the_configuration(variant: str) -> None:
    for workload in workloads(variant):
        config = configuration(variant, workload)
        expected = {
            "grpc": port_of(config.server.listen),
            "metrics": port_of(config.server.metrics_listen),
            "health": port_of(config.server.health_listen),
        }
        if getattr(config, "http_listen", None) is not None:
            expected["http"] = port_of(config.http_listen)
        assert workload.container_ports == expected
        service = named(variant, "Service", f"tandem-{workload.service}")
        del expected["health"]
        assert {p["name"]: p["port"] for p in service["spec"]["ports"]} == expected
        assert all(p["targetPort"] == p["name"] for p in service["spec"]["ports"])
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"].items() <= workload.labels.items()
        for port in service["spec"]["ports"]:
            is_tls = port["name"] != "metrics" and config.server.tls_cert is not None
            plain = "kubernetes.io/h2c" if port["name"] == "grpc" else "http"
            assert port["appProtocol"] == ("https" if is_tls else plain)


@pytest.mark.parametrize("variant", VARIANTS)
def test_clients_of_http_have_one_address_for_all_gateways(variant: str) -> None:
    service = named(variant, "Service", "tandem-gateway-http")["spec"]
    assert service.get("clusterIP") != "None"
    headless = named(variant, "Service", "tandem-gateway")["spec"]
    assert service["selector"] == headless["selector"]
    assert service["ports"] == [port for port in headless["ports"] if port["name"] == "http"]
    for certificate in of_kind(variant, "Certificate"):
        if certificate["metadata"]["name"] == "tandem-gateway":
            assert "tandem-gateway-http.tandem.svc" in certificate["spec"]["dnsNames"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_use_the_health_port_and_known_health_services(variant: str) -> None:
    for workload in workloads(variant):
        container = workload.container
        answered = {"", LIVENESS_NAME, CODE[workload.service].health_name}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["grpc"]
            assert asked["port"] == workload.container_ports["health"]
            assert asked.get("service", "") in answered
        # Readiness depends on load and peers: a restart for it would make things worse.
        assert container["livenessProbe"]["grpc"]["service"] == LIVENESS_NAME
        assert container["readinessProbe"]["grpc"].get("service", "") != LIVENESS_NAME


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pod_has_the_time_to_drain(variant: str) -> None:
    for workload in workloads(variant):
        server = configuration(variant, workload).server
        drain_s = server.drain_timeout_s
        pause_s = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert workload.pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + END_S
        for word in workload.container.get("command", ()):
            if word.startswith("--shutdown-timeout="):
                assert int(word.partition("=")[2]) >= drain_s + END_S


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hung_process_restarts_within_a_minute(variant: str) -> None:
    for workload in workloads(variant):
        config = configuration(variant, workload)
        liveness = workload.container["livenessProbe"]
        noticed_s = liveness["periodSeconds"] * liveness["failureThreshold"]
        ended_s = liveness["terminationGracePeriodSeconds"]
        # A process that hangs does not answer.
        assert noticed_s + liveness["timeoutSeconds"] + ended_s <= 60
        # A verifier whose engine hangs answers at once: that it is not alive. It may have hung
        # since the check before the last one.
        stalled_s = getattr(config, "stall_timeout_s", 0.0) * (1 + 1 / CHECKS_PER_TIMEOUT)
        assert stalled_s + noticed_s + ended_s <= 60
        # One failed probe may be an accident.
        assert liveness["failureThreshold"] >= 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rollout_waits_until_callers_find_the_new_pod(variant: str) -> None:
    resolve_interval_s = configuration(variant, workloads(variant)[0]).peers.resolve_interval_s
    for workload in workloads(variant):
        spec = workload.manifest["spec"]
        assert spec["minReadySeconds"] >= DNS_CACHE_S + resolve_interval_s
        if workload.service == "gateway":
            # Clients outside of Tandem know of a drain by DNS only.
            pause_s = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert pause_s > DNS_CACHE_S


def startup_s(workload: Workload) -> int:
    """The longest start."""
    startup = workload.container["startupProbe"]
    return int(startup["periodSeconds"] * startup["failureThreshold"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rollout_does_not_fail_while_models_load(variant: str) -> None:
    [caller, _, verifiers] = workloads(variant)
    # A gateway is ready once it has a verifier.
    for workload, ready_s in (
        (caller, startup_s(caller) + startup_s(verifiers)),
        (verifiers, startup_s(verifiers)),
    ):
        spec = workload.manifest["spec"]
        if workload.manifest["kind"] == "Deployment":
            # 600 is Kubernetes' default.
            deadline_s = spec.get("progressDeadlineSeconds", 600)
            assert deadline_s > ready_s + spec["minReadySeconds"], workload.service


@pytest.mark.parametrize("variant", VARIANTS)
def test_gateways_find_all_replicas_by_a_headless_service(variant: str) -> None:
    [caller, drafters, verifiers] = workloads(variant)
    config = configuration(variant, caller)
    for addresses, callee in ((config.drafters, drafters), (config.verifiers, verifiers)):
        # One name of all replicas: scaling needs no other configuration.
        [address] = map(parse_address, addresses)
        assert address.port == callee.container_ports["grpc"]
        service = named(variant, "Service", address.host)["spec"]
        assert service["clusterIP"] == "None"
        assert service["selector"].items() <= callee.labels.items()


@pytest.mark.parametrize("variant", VARIANTS)
def test_verifiers_admit_the_drafters_that_gateways_name(variant: str) -> None:
    [caller, _, verifiers] = workloads(variant)
    admitted = AdmittedDrafters(configuration(variant, verifiers).drafters)
    for address in configuration(variant, caller).drafters:
        assert admitted.admit(address), address


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "mtls" not in VARIANTS[v]])
def test_without_tls_services_may_call_their_peers_in_plaintext(variant: str) -> None:
    [caller, _, verifiers] = workloads(variant)
    for config in (configuration(variant, caller), configuration(variant, verifiers)):
        for address in [*getattr(config, "verifiers", ()), *config.drafters]:
            assert channel_credentials(address, config.peers) is None


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "mtls" in VARIANTS[v]])
def test_under_mtls_services_require_certificates_with_the_called_names(variant: str) -> None:
    names: dict[str, set[str]] = {}
    for workload in workloads(variant):
        config = configuration(variant, workload)
        [mount] = [m for m in workload.container["volumeMounts"] if m["name"] == "tls"]
        [volume] = [v for v in workload.pod["volumes"] if v["name"] == "tls"]
        [certificate] = [
            c
            for c in of_kind(variant, "Certificate")
            if c["spec"]["secretName"] == volume["secret"]["secretName"]
        ]
        names[workload.service] = set(certificate["spec"]["dnsNames"])
        server = config.server
        assert not server.allow_plaintext
        # The files of cert-manager's Secret.
        files = [(server.tls_cert, "tls.crt"), (server.tls_key, "tls.key")]
        if workload.service == "gateway":
            # Clients and proxies have tokens, over HTTP, too.
            assert server.tls_client_ca is None
            assert config.http_listen is not None
        else:
            files.append((server.tls_client_ca, "ca.crt"))
        is_caller = workload.service in ("gateway", "verifier")
        assert ("client auth" in certificate["spec"]["usages"]) is is_caller
        if is_caller:
            peers = config.peers
            assert not peers.peer_allow_plaintext
            files.append((peers.peer_tls_ca, "ca.crt"))
            files += [(peers.peer_tls_cert, "tls.crt"), (peers.peer_tls_key, "tls.key")]
        for file, name in files:
            assert file == Path(mount["mountPath"]) / name
    [_, drafters, verifiers] = workloads(variant)
    for called, callers in ((drafters, ["verifier", "gateway"]), (verifiers, ["gateway"])):
        all_allowed = configuration(variant, called).server.allowed_clients
        for allowed, caller in zip(all_allowed, callers, strict=True):
            assert allowed in names[caller]
            assert not any(allowed in found for other, found in names.items() if other != caller)
    config = configuration(variant, workloads(variant)[0])
    for callee, addresses in (("drafter", config.drafters), ("verifier", config.verifiers)):
        assert {parse_address(address).host for address in addresses} <= names[callee]


def test_models_are_mounted_where_the_services_read_them() -> None:
    for variant in VARIANTS:
        [caller, _, verifiers] = workloads(variant)
        paths = [
            PurePosixPath(environment(variant, caller)["TANDEM_GATEWAY_TOKENIZER"]),
            PurePosixPath(environment(variant, verifiers)["TANDEM_VERIFIER_MODEL"]),
        ]
        assert paths[0] == paths[1]
        for workload in (caller, verifiers):
            [mount] = [m for m in workload.container["volumeMounts"] if m["name"] == "model"]
            assert paths[0].is_relative_to(mount["mountPath"])
            assert mount["readOnly"]


def exported_metrics() -> set[str]:
    """The names of the series that the services export without TLS, before the first request."""
    after = (
        "tandem_certificate_",
        "tandem_file_",
        "tandem_rpc_",
        "tandem_spec_decode_num_accepted_tokens_per_pos",
    )
    return {name for name in metric_names.exported() if not name.startswith(after)}


def test_autoscalers_use_exported_metrics() -> None:
    queries = [
        trigger["metadata"]["query"]
        for scaled in of_kind("all", "ScaledObject")
        for trigger in scaled["spec"]["triggers"]
    ]
    [hpa] = of_kind("all", "HorizontalPodAutoscaler")
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


def test_autoscalers_have_targets_and_scale_before_shedding() -> None:
    variant = "all"
    targets = {
        (m["kind"], m["metadata"]["name"]) for m in of_kind(variant, "Deployment", "StatefulSet")
    }
    scalers = list(of_kind(variant, "ScaledObject", "HorizontalPodAutoscaler"))
    scaled = {
        (s["spec"]["scaleTargetRef"]["kind"], s["spec"]["scaleTargetRef"]["name"]) for s in scalers
    }
    assert scaled == targets
    for manifest in resolve(variant):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            assert "replicas" not in manifest["spec"], "it would undo the autoscaler's work"
    [caller, drafters, verifiers] = (configuration(variant, w) for w in workloads(variant))
    triggers = [
        trigger["metadata"]
        for s in scalers
        if s["kind"] == "ScaledObject"
        for trigger in s["spec"]["triggers"]
    ]
    thresholds = {one["query"]: float(one["threshold"]) for one in triggers}

    def total(*metrics: str) -> str:
        return " + ".join(f'sum(tandem_{metric}{{namespace="tandem"}})' for metric in metrics)

    busy = total("verifier_sequences_running", "verifier_sequences_waiting")
    # Whatever the verifiers' flag, of which this is a percentage.
    most = 'avg(tandem_verifier_max_num_seqs{namespace="tandem"})'
    assert 50 < thresholds[f"100 * ({busy}) / {most}"] < 100
    assert verifiers.max_num_seqs < verifiers.max_num_waiting / 2
    open_streams = thresholds[total("num_requests_running", "num_requests_waiting")]
    assert open_streams < caller.max_concurrent_requests / 2
    # Where Prometheus does not answer, nothing is scaled down.
    assert {one["ignoreNullValues"] for one in triggers} == {"false"}
    [hpa] = [s for s in scalers if s["kind"] == "HorizontalPodAutoscaler"]
    [pods] = [m for m in hpa["spec"]["metrics"] if m["type"] == "Pods"]
    mebibytes = int(pods["pods"]["target"]["averageValue"].removesuffix("Mi"))
    assert mebibytes << 20 < drafters.max_history_bytes


@pytest.mark.parametrize("variant", ["dev+hpa", "all"])
def test_drafters_are_added_before_one_event_loop_is_busy(variant: str) -> None:
    [hpa] = of_kind(variant, "HorizontalPodAutoscaler")
    [cpu] = [m["resource"] for m in hpa["spec"]["metrics"] if m["type"] == "Resource"]
    requested = workloads(variant)[1].container["resources"]["requests"]["cpu"]
    cores = float(requested.removesuffix("m")) / (1000 if requested.endswith("m") else 1)
    # The autoscaler does nothing within a tenth of its target.
    assert cores * cpu["target"]["averageUtilization"] / 100 * 1.1 < 0.9


def test_autoscalers_look_at_their_own_namespace_only() -> None:
    for namespace in ("tandem", "serving"):
        manifests = resolve_in_namespace("all", namespace)
        for scaled in manifests:
            for trigger in scaled["spec"].get("triggers", ()) if "spec" in scaled else ():
                query = trigger["metadata"]["query"]
                selectors = re.findall(r"tandem_\w+(\{.*?\})?", query)
                assert selectors
                assert set(selectors) == {f'{{namespace="{namespace}"}}'}


def test_a_step_on_a_gpu_has_room_for_every_sequence_and_its_drafts() -> None:
    for variant in ("gpu", "gpu+tensor-parallel", "ha"):
        config = configuration(variant, workloads(variant)[2])
        assert config.max_num_batched_tokens >= config.max_num_seqs * (
            1 + config.max_num_speculative_tokens
        )


def test_routes_lead_to_what_gateways_serve() -> None:
    services = {CODE["gateway"].health_name, health.SERVICE_NAME}
    [grpc_route] = of_kind("dev+gateway-api", "GRPCRoute")
    for rule in grpc_route["spec"]["rules"]:
        assert {match["method"]["service"] for match in rule["matches"]} <= services
    # Only requests need the service's parts.
    api = OpenAiApi.__new__(OpenAiApi)
    application = make_application(CollectorRegistry(), api.routes(), lambda: True)
    paths = {cast(Route, route).path for route in application.routes} - {"/metrics"}
    [http_route] = of_kind("dev+gateway-api", "HTTPRoute")
    for route in (grpc_route, http_route):
        [called] = [backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
        service = named("dev+gateway-api", "Service", called["name"])
        assert called["port"] in [port["port"] for port in service["spec"]["ports"]]
    for rule in http_route["spec"]["rules"]:
        for match in rule["matches"]:
            prefix = match["path"]["value"]
            if match["path"]["type"] == "PathPrefix":
                assert any(path.startswith(f"{prefix}/") for path in paths)
            else:
                assert prefix in paths


def test_no_route_ends_a_stream_by_a_timeout() -> None:
    [http_route] = of_kind("dev+gateway-api", "HTTPRoute")
    assert [rule["timeouts"] for rule in http_route["spec"]["rules"]] == [{"request": "0s"}]
    # Routes of gRPC have no field for it.
    [grpc_route] = of_kind("dev+gateway-api", "GRPCRoute")
    page = (REPOSITORY / "docs" / "deploy.md").read_text()
    [block] = re.findall(r"```yaml\n([^`]*?BackendTrafficPolicy.*?)```", page, re.DOTALL)
    policy = yaml.safe_load(block)["spec"]
    [target] = policy["targetRefs"]
    assert (target["kind"], target["name"]) == ("GRPCRoute", grpc_route["metadata"]["name"])
    assert policy["timeout"]["http"] == {"requestTimeout": "0s"}


@pytest.mark.parametrize("variant", ["gpu+tensor-parallel", "all"])
def test_tensor_parallel_sizes_agree(variant: str) -> None:
    from torch.distributed.run import get_args_parser

    workload = workloads(variant)[2]
    command = workload.container["command"]
    assert command[:3] == ["python", "-m", "torch.distributed.run"]
    parsed = get_args_parser().parse_args(command[3:])
    assert (parsed.module, parsed.training_script) == (True, "verifier")
    num_gpus = workload.container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(parsed.nproc_per_node) == num_gpus
    assert f"--tensor-parallel-size={num_gpus}" in parsed.training_script_args
    # 70 billion weights of 2 bytes: rank 0 reads them for itself, for the check and for the digest,
    # and the others their parts.
    assert startup_s(workload) > 4 * 141e9 / 300e6
