"""The manifests agree with the services' code.

The services' own loader reads the configuration; names of health services and metrics come from the
code. A manifest that disagrees fails here and not in a cluster.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pydantic
import pytest

import drafter.config
import drafter.service
import gateway.api.grpc_service
import gateway.config
import verifier.config
import verifier.server
from gateway.routing.aliases import parse_aliases
from servicekit.address import parse_address
from servicekit.channels.tls import channel_credentials
from servicekit.config import list_options, parse_config
from servicekit.serving.health import LIVENESS_NAME
from tests.deploy.manifests import (
    CHART,
    SERVICES,
    VARIANTS,
    Workload,
    named,
    of_kind,
    workloads,
)
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


def configuration(workload: Workload) -> Any:
    flags = arguments(workload)
    config = CODE[workload.service].config
    return parse_config(config, service=workload.service, argv=flags, environ=workload.environment)


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
        assert set(workload.environment) - {"OTEL_EXPORTER_OTLP_ENDPOINT"} <= known


@pytest.mark.parametrize("service", SERVICES)
def test_flags_may_be_set_but_those_that_the_chart_sets_by_other_values(service: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    owner = schema["$defs"]["model"] if service == "verifier" else schema["properties"][service]
    settable = set(owner["properties"]["config"]["propertyNames"]["enum"])
    flags = {option.name for option in list_options(CODE[service].config, service=service)}
    assert settable <= flags
    for name in flags - settable:
        variable = f"TANDEM_{service.upper()}_{name.upper()}"
        assert name == "tensor_parallel_size" or any(
            variable in workload.environment
            for variant in VARIANTS
            for workload in workloads(variant)
        ), variable


@pytest.mark.parametrize("variant", VARIANTS)
def test_ports_are_those_of_the_configuration(variant: str) -> None:
    for workload in workloads(variant):
        config = configuration(workload)
        expected = {
            "grpc": port_of(config.server.listen),
            "metrics": port_of(config.server.metrics_listen),
            "health": port_of(config.server.health_listen),
        }
        if getattr(config, "http_listen", None) is not None:
            expected["http"] = port_of(config.http_listen)
        assert workload.container_ports == expected
        service = named(variant, "Service", workload.name)
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
        server = configuration(workload).server
        drain_s = server.drain_timeout_s
        pause_s = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert workload.pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + END_S
        for word in workload.container.get("command", ()):
            if word.startswith("--shutdown-timeout="):
                assert int(word.partition("=")[2]) >= drain_s + END_S


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hung_process_restarts_within_a_minute(variant: str) -> None:
    for workload in workloads(variant):
        config = configuration(workload)
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
    resolve_interval_s = configuration(workloads(variant)[0]).peers.resolve_interval_s
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
    [caller, _, *verifiers] = workloads(variant)
    # A gateway is ready once it has a verifier.
    for workload, ready_s in (
        (caller, startup_s(caller) + max(map(startup_s, verifiers))),
        *((each, startup_s(each)) for each in verifiers),
    ):
        spec = workload.manifest["spec"]
        if workload.manifest["kind"] == "Deployment":
            # 600 is Kubernetes' default.
            deadline_s = spec.get("progressDeadlineSeconds", 600)
            assert deadline_s > ready_s + spec["minReadySeconds"], workload.service


@pytest.mark.parametrize("variant", VARIANTS)
def test_gateways_find_all_replicas_by_a_headless_service(variant: str) -> None:
    [caller, drafters, *verifiers] = workloads(variant)
    config = configuration(caller)
    for addresses, callees in ((config.drafters, [drafters]), (config.verifiers, verifiers)):
        # One name of all replicas: scaling needs no other configuration.
        for address, callee in zip(map(parse_address, addresses), callees, strict=True):
            assert address.port == callee.container_ports["grpc"]
            service = named(variant, "Service", address.host)["spec"]
            assert service["clusterIP"] == "None"
            assert service["selector"].items() <= callee.labels.items()


@pytest.mark.parametrize("variant", VARIANTS)
def test_verifiers_admit_the_drafters_that_gateways_name(variant: str) -> None:
    [caller, _, *verifiers] = workloads(variant)
    for each in verifiers:
        admitted = AdmittedDrafters(configuration(each).drafters)
        for address in configuration(caller).drafters:
            assert admitted.admit(address), address


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "mtls" not in VARIANTS[v]])
def test_without_tls_services_may_call_their_peers_in_plaintext(variant: str) -> None:
    [caller, _, *verifiers] = workloads(variant)
    for config in (configuration(caller), *map(configuration, verifiers)):
        for address in [*getattr(config, "verifiers", ()), *config.drafters]:
            assert channel_credentials(address, config.peers) is None


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "mtls" in VARIANTS[v]])
def test_under_mtls_services_require_certificates_with_the_called_names(variant: str) -> None:
    names: dict[str, set[str]] = {}
    for workload in workloads(variant):
        config = configuration(workload)
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
    [_, drafters, *verifiers] = workloads(variant)
    for called, callers in (
        (drafters, ["verifier", "gateway"]),
        *((each, ["gateway"]) for each in verifiers),
    ):
        all_allowed = configuration(called).server.allowed_clients
        for allowed, caller in zip(all_allowed, callers, strict=True):
            assert allowed in names[caller]
            assert not any(allowed in found for other, found in names.items() if other != caller)
    config = configuration(workloads(variant)[0])
    for callee, addresses in (("drafter", config.drafters), ("verifier", config.verifiers)):
        assert {parse_address(address).host for address in addresses} <= names[callee]


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_are_mounted_where_the_services_read_them(variant: str) -> None:
    [caller, _, *verifiers] = workloads(variant)
    tokenizers = configuration(caller).tokenizer
    assert len(tokenizers) == len(verifiers)
    for workload, path in (
        *((caller, path) for path in tokenizers),
        *((each, configuration(each).model) for each in verifiers),
    ):
        # Of each model its own.
        [mount] = [
            mount
            for mount in workload.container["volumeMounts"]
            if path.is_relative_to(mount["mountPath"])
        ]
        assert mount["readOnly"]
        assert mount["name"] in {volume["name"] for volume in workload.pod["volumes"]}


def test_gateways_know_the_aliases() -> None:
    aliases = parse_aliases(configuration(workloads("canary")[0]).model_aliases)
    assert aliases == {"chat": {"model": 9, "organisation/new:1": 1}}


@pytest.mark.parametrize("variant", ["gpu", "ha", "tensor-parallel", "two-models"])
def test_a_step_on_a_gpu_has_room_for_every_sequence_and_its_drafts(variant: str) -> None:
    for workload in workloads(variant)[2:]:
        config = configuration(workload)
        assert config.max_num_batched_tokens >= config.max_num_seqs * (
            1 + config.max_num_speculative_tokens
        )


@pytest.mark.parametrize("variant", ["tensor-parallel", "two-models"])
def test_tensor_parallel_sizes_agree(variant: str) -> None:
    from torch.distributed.run import get_args_parser

    workload = workloads(variant)[-1]
    command = workload.container["command"]
    assert command[:3] == ["python", "-m", "torch.distributed.run"]
    parsed = get_args_parser().parse_args(command[3:])
    assert (parsed.module, parsed.training_script) == (True, "verifier")
    num_gpus = workload.container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(parsed.nproc_per_node) == num_gpus > 1
    assert f"--tensor-parallel-size={num_gpus}" in parsed.training_script_args
    # What the verifiers would take by themselves.
    assert configuration(workload).kv_memory_fraction == 0.8
    # 70 billion weights of 2 bytes: rank 0 reads them for itself, for the check and for the digest,
    # and the others their parts.
    assert startup_s(workload) > 4 * 141e9 / 300e6
