"""The parsed rule files."""

import functools
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.monitoring.metric_names import exported, grouped, selected

REPOSITORY = Path(__file__).resolve().parents[3]
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
RULE_FILES = [PROMETHEUS / "recording.yml", PROMETHEUS / "alerts.yml"]
TEST_FILES = sorted((PROMETHEUS / "tests").glob("*.yml"))


@functools.cache
def rules() -> list[dict[str, Any]]:
    """The rules of all groups."""
    return [
        rule
        for path in RULE_FILES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


@functools.cache
def recorded() -> dict[str, frozenset[str]]:
    """The labels of every recorded series: those it is grouped by, or its metrics', and its own."""
    found: dict[str, frozenset[str]] = {}
    for rule in rules():
        if "record" in rule:
            metrics = selected(rule["expr"])
            assert metrics, rule
            labels = grouped(rule["expr"])
            if " by (" not in rule["expr"]:
                labels |= {"instance"}.union(*(exported()[metric.name] for metric in metrics))
            own = frozenset((labels | rule.get("labels", {}).keys()) - {"le"})
            found[rule["record"]] = found.get(rule["record"], own) & own
    return found


@functools.cache
def alert_cases() -> list[dict[str, Any]]:
    """The cases of alerts for promtool."""
    return [
        case
        for path in TEST_FILES
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test.get("alert_rule_test", ())
    ]
