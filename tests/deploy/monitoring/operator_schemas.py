"""JSON schemas for the kinds of monitoring.coreos.com/v1 in `components/monitoring`.

After the Prometheus operator's custom resource definitions, with the used fields only; other fields
are refused, as in a cluster with strict validation.
"""

from typing import Any

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d))+$"}


def _strict(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _manifest(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _strict({"name": {}, "namespace": {}, "labels": _TEXTS}, "name")
    return _strict(
        {
            "apiVersion": {"const": "monitoring.coreos.com/v1"},
            "kind": {"const": kind},
            "metadata": metadata,
            "spec": spec,
        },
        "apiVersion",
        "kind",
        "metadata",
        "spec",
    )


_RULE = {
    **_strict(
        {
            "record": {"type": "string", "pattern": "^[a-zA-Z_:][a-zA-Z0-9_:]*$"},
            "alert": {"type": "string"},
            "expr": {"type": ["string", "integer"]},
            "for": _DURATION,
            "labels": _TEXTS,
            "annotations": _TEXTS,
        },
        "expr",
    ),
    "oneOf": [{"required": ["record"]}, {"required": ["alert"]}],
}
_GROUP = _strict(
    {
        "name": {"type": "string", "minLength": 1},
        "rules": {"type": "array", "items": _RULE, "minItems": 1},
    },
    "name",
    "rules",
)
_RELABELING = _strict(
    {"targetLabel": {"type": "string"}, "replacement": {"type": "string"}},
)
_ENDPOINT = _strict(
    {
        "port": {"type": "string"},
        "interval": _DURATION,
        "relabelings": {"type": "array", "items": _RELABELING},
    },
    "port",
)

SCHEMAS = {
    "PrometheusRule": _manifest(
        "PrometheusRule", _strict({"groups": {"type": "array", "items": _GROUP}}, "groups")
    ),
    "ServiceMonitor": _manifest(
        "ServiceMonitor",
        _strict(
            {
                "selector": _strict({"matchLabels": _TEXTS}),
                "endpoints": {"type": "array", "items": _ENDPOINT},
            },
            "selector",
            "endpoints",
        ),
    ),
}
