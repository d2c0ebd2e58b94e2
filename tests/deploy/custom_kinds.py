"""JSON schemas of the custom kinds that `deploy/` uses.

They allow only the fields that the manifests use, with their types, after the projects' published
API types: cert-manager v1, KEDA v1alpha1, Gateway API v1, LeaderWorkerSet v1. Pod templates in them
are checked by Kubernetes' own schemas.
"""

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_BOOL: Schema = {"type": "boolean"}
_NUMBER_TEXT: Schema = {"type": "string", "pattern": "^[0-9.]+$"}
_NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_DURATION: Schema = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_POD_TEMPLATE: Schema = {"type": "object", "required": ["spec"]}


def _object(*required: str, **fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "additionalProperties": False,
        "required": list(required),
    }


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _choice(*values: object) -> Schema:
    return {"enum": list(values)}


def _kind(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object("name", name=_NAME, namespace=_NAME, labels=_TEXTS, annotations=_TEXTS)
    return _object(
        "apiVersion",
        "kind",
        "metadata",
        "spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_ISSUER = _object(selfSigned=_object(), ca=_object("secretName", secretName=_NAME))
_ISSUER |= {"minProperties": 1, "maxProperties": 1}

_CERTIFICATE = _object(
    "secretName",
    "issuerRef",
    secretName=_NAME,
    commonName={"type": "string", "maxLength": 64},
    dnsNames=_array(_TEXT),
    isCA=_BOOL,
    duration=_DURATION,
    renewBefore=_DURATION,
    usages=_array(_choice("server auth", "client auth", "digital signature", "cert sign")),
    privateKey=_object(
        algorithm=_choice("RSA", "ECDSA", "Ed25519"),
        size=_choice(256, 384, 521, 2048, 4096),
        rotationPolicy=_choice("Never", "Always"),
    ),
    issuerRef=_object("name", name=_NAME, kind=_choice("Issuer", "ClusterIssuer"), group=_TEXT),
)

_SCALING_RULES = _object(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy=_choice("Max", "Min", "Disabled"),
    policies=_array(
        _object(
            "type",
            "value",
            "periodSeconds",
            type=_choice("Pods", "Percent"),
            value=_INTEGER,
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        )
    ),
)

_SCALED_OBJECT = _object(
    "scaleTargetRef",
    "triggers",
    scaleTargetRef=_object("name", apiVersion=_TEXT, kind=_TEXT, name=_NAME),
    pollingInterval=_INTEGER,
    cooldownPeriod=_INTEGER,
    minReplicaCount=_INTEGER,
    maxReplicaCount=_INTEGER,
    advanced=_object(
        horizontalPodAutoscalerConfig=_object(
            behavior=_object(scaleUp=_SCALING_RULES, scaleDown=_SCALING_RULES)
        )
    ),
    triggers=_array(
        _object(
            "type",
            "metadata",
            type={"const": "prometheus"},
            metricType=_choice("AverageValue", "Value"),
            metadata=_object(
                "serverAddress",
                "query",
                "threshold",
                serverAddress={"type": "string", "pattern": "^https?://"},
                query=_TEXT,
                threshold=_NUMBER_TEXT,
                activationThreshold=_NUMBER_TEXT,
                ignoreNullValues=_choice("true", "false"),
            ),
        )
    ),
)

_PARENTS = _array(_object("name", namespace=_NAME, name=_NAME, sectionName=_NAME, port=_PORT))
_BACKENDS = _array(_object("name", "port", namespace=_NAME, name=_NAME, port=_PORT))

_GRPC_ROUTE = _object(
    "rules",
    parentRefs=_PARENTS,
    hostnames=_array(_TEXT),
    rules=_array(
        _object(
            matches=_array(_object(method=_object(service=_TEXT, method=_TEXT))),
            backendRefs=_BACKENDS,
        )
    ),
)

_HTTP_ROUTE = _object(
    "rules",
    parentRefs=_PARENTS,
    hostnames=_array(_TEXT),
    rules=_array(
        _object(
            matches=_array(
                _object(
                    path=_object(
                        "type",
                        "value",
                        type=_choice("Exact", "PathPrefix"),
                        value={"type": "string", "pattern": "^/"},
                    )
                )
            ),
            backendRefs=_BACKENDS,
        )
    ),
)

_LEADER_WORKER_SET = _object(
    "leaderWorkerTemplate",
    replicas=_INTEGER,
    startupPolicy=_choice("LeaderCreated", "LeaderReady"),
    rolloutStrategy=_object(
        "type",
        type=_choice("RollingUpdate"),
        rollingUpdateConfiguration=_object(
            maxUnavailable={"type": ["integer", "string"]}, maxSurge={"type": ["integer", "string"]}
        ),
    ),
    leaderWorkerTemplate=_object(
        "workerTemplate",
        leaderTemplate=_POD_TEMPLATE,
        workerTemplate=_POD_TEMPLATE,
        size={"type": "integer", "minimum": 1},
        restartPolicy=_choice("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
    ),
)

#: By kind.
SCHEMAS: dict[str, Schema] = {
    kind: _kind(api_version, kind, spec)
    for api_version, kind, spec in (
        ("cert-manager.io/v1", "Issuer", _ISSUER),
        ("cert-manager.io/v1", "Certificate", _CERTIFICATE),
        ("keda.sh/v1alpha1", "ScaledObject", _SCALED_OBJECT),
        ("gateway.networking.k8s.io/v1", "GRPCRoute", _GRPC_ROUTE),
        ("gateway.networking.k8s.io/v1", "HTTPRoute", _HTTP_ROUTE),
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", _LEADER_WORKER_SET),
    )
}
