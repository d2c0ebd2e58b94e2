"""What leads to the gateways: Services, routes, the pool of an endpoint picker."""

import re
from typing import Any, cast

import jsonschema
import pytest
import yaml
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from gateway.api.http import make_application
from gateway.api.openai.service import OpenAiApi
from servicekit.serving import health
from tests.deploy.manifests import REPOSITORY, VARIANTS, named, of_kind, workloads
from tests.deploy.monitoring import metric_names
from tests.deploy.test_manifests_match_code import CODE
from tests.deploy.test_security import selects


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


def served_paths() -> set[str]:
    # Only requests need the service's parts.
    api = OpenAiApi.__new__(OpenAiApi)
    application = make_application(CollectorRegistry(), api.routes(), lambda: True)
    return {cast(Route, route).path for route in application.routes}


def test_routes_lead_to_what_gateways_serve() -> None:
    services = {CODE["gateway"].health_name, health.SERVICE_NAME}
    [grpc_route] = of_kind("gateway-api", "GRPCRoute")
    for rule in grpc_route["spec"]["rules"]:
        assert {match["method"]["service"] for match in rule["matches"]} <= services
    [http_route] = of_kind("gateway-api", "HTTPRoute")
    for route in (grpc_route, http_route):
        [called] = [backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
        service = named("gateway-api", "Service", called["name"])
        assert called["port"] in [port["port"] for port in service["spec"]["ports"]]
    paths = served_paths() - {"/metrics"}
    for rule in http_route["spec"]["rules"]:
        for match in rule["matches"]:
            prefix = match["path"]["value"]
            if match["path"]["type"] == "PathPrefix":
                assert any(path.startswith(f"{prefix}/") for path in paths)
            else:
                assert prefix in paths


def test_no_route_ends_a_stream_by_a_timeout() -> None:
    [http_route] = of_kind("gateway-api", "HTTPRoute")
    assert [rule["timeouts"] for rule in http_route["spec"]["rules"]] == [{"request": "0s"}]
    # Routes of gRPC have no field for it.
    [grpc_route] = of_kind("gateway-api", "GRPCRoute")
    [policy] = of_kind("gateway-api", "BackendTrafficPolicy")
    [target] = policy["spec"]["targetRefs"]
    assert (target["kind"], target["name"]) == ("GRPCRoute", grpc_route["metadata"]["name"])
    assert policy["spec"]["timeout"]["http"] == {"requestTimeout": "0s"}


# InferencePool of inference.networking.k8s.io/v1, by its published fields and their validation.
_NUMBER = {"type": "integer", "minimum": 1, "maximum": 65535}
_PORT = {"type": "object", "required": ["number"], "properties": {"number": _NUMBER}}
_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
INFERENCE_POOL: dict[str, Any] = {
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "additionalProperties": False,
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "additionalProperties": False,
            "properties": {
                "matchLabels": {
                    "type": "object",
                    "maxProperties": 64,
                    "additionalProperties": {
                        "type": "string",
                        "maxLength": 63,
                        "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
                    },
                }
            },
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": {**_PORT, "additionalProperties": False},
        },
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {
                "group": {"type": "string", "maxLength": 253},
                "kind": {"type": "string", "pattern": "^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$"},
                "name": _NAME,
                "port": {**_PORT, "additionalProperties": False},
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}


@pytest.mark.parametrize("variant", ["inference-pool", "all"])
def test_the_pool_has_the_gateways_and_the_route_leads_to_it(variant: str) -> None:
    [pool] = of_kind(variant, "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    jsonschema.validate(pool["spec"], INFERENCE_POOL)
    # A picker of Services needs a port.
    assert "port" in pool["spec"]["endpointPickerRef"]
    [gateway, *others] = workloads(variant)
    assert selects(pool["spec"]["selector"], gateway.labels)
    assert not any(selects(pool["spec"]["selector"], other.labels) for other in others)
    [port] = pool["spec"]["targetPorts"]
    assert port["number"] == gateway.container_ports["http"]
    # The picker reads the metrics at the same port.
    assert "/metrics" in served_paths()
    [route] = of_kind(variant, "HTTPRoute")
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    assert backend == {
        "group": "inference.networking.k8s.io",
        "kind": "InferencePool",
        "name": pool["metadata"]["name"],
    }


def test_the_documented_picker_reads_gauges_of_one_series_each() -> None:
    page = (REPOSITORY / "docs" / "deploy.md").read_text()
    [block] = re.findall(r"```yaml\n([^`]*EndpointPickerConfig.*?)```", page, re.DOTALL)
    config = yaml.safe_load(block)
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    extractor = plugins["core-metrics-extractor"]
    [engine] = extractor["engineConfigs"]
    assert engine["name"] == extractor["defaultEngine"]
    gauges = {name for spec, name in engine.items() if spec.endswith("Spec") and name}
    assert len(gauges) == 3
    for name in gauges:
        # It keeps one series of each, and sums none.
        assert metric_names.exported()[name] == set()
    for profile in config["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= plugins.keys()
