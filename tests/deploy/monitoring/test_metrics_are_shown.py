"""Every metric is shown or explained, and what dashboards, rules and pages name is exported.

`test_metric_names.py` compares the list of metrics with running services; here the list is compared
with whatever uses it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.grafana.generate import DASHBOARDS
from tests.deploy.monitoring.metric_names import GOLDEN, exported, selected
from tests.deploy.monitoring.rules import REPOSITORY, recorded, rules

PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))
_SUFFIXES = re.compile(r"_(bucket|sum|count)$")
_NAME = re.compile(r"\btandem_[a-z0-9_]*[a-z0-9]\b(?!_?\*)")
_RECORDED_NAME = re.compile(r"\btandem:[a-z]\w*:\w+")


def families() -> set[str]:
    """Names of Tandem's metrics, of histograms without suffix."""
    metrics = [line.split(" ", 2)[2] for line in GOLDEN.read_text().splitlines()]
    return {name.partition("{")[0] for name in metrics if name.startswith("tandem_")}


def shown() -> Iterator[str]:
    """Names in the queries of dashboards and rules."""
    queries = [
        query.expression
        for dashboard in DASHBOARDS
        for panel in dashboard.panels()
        for query in panel.queries
    ]
    for expression in (*queries, *(rule["expr"] for rule in rules())):
        for metric in selected(expression):
            yield _SUFFIXES.sub("", metric.name)


def test_every_metric_is_on_a_dashboard_or_in_a_rule_or_explained() -> None:
    explained = {name for page in PAGES for name in _NAME.findall(page.read_text())}
    assert families() - set(shown()) - explained == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_metrics_that_are_exported(page: Path) -> None:
    text = page.read_text()
    # A module is named like them.
    known = {*families(), *exported(), "tandem_vllm"}
    assert set(_NAME.findall(text)) - known == set()
    assert set(_RECORDED_NAME.findall(text)) - recorded().keys() == set()


def test_every_recorded_series_is_explained() -> None:
    text = (REPOSITORY / "docs" / "monitoring.md").read_text()
    # Of one name over several windows, the page names one.
    missing = {re.sub(r"_rate(5m|30m|1h|6h)$", "_rate", name) for name in recorded()}
    assert {name for name in missing if name not in text} == set()


# Of those that vLLM documents; of counters as scraped.
VLLM_METRICS = {
    "cache_config_info",
    "e2e_request_latency_seconds",
    "generation_tokens_total",
    "inter_token_latency_seconds",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_total",
    "request_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_time_per_output_token_seconds",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_drafts_total",
    "time_to_first_token_seconds",
}


def test_the_relabelling_for_vllms_dashboards_renames_what_vllm_has() -> None:
    page = (REPOSITORY / "docs" / "monitoring.md").read_text()
    [block] = re.findall(r"```yaml\n(metric_relabel_configs:.*?)```", page, re.DOTALL)
    names, model = yaml.safe_load(block)["metric_relabel_configs"]
    assert (names["target_label"], names["source_labels"]) == ("__name__", ["__name__"])
    assert (model["target_label"], model["source_labels"]) == ("model_name", ["model"])
    renamed = {
        _SUFFIXES.sub("", found.expand(names["replacement"].replace("$", "\\")))
        for series in exported()
        if (found := re.fullmatch(names["regex"], series))
    }
    assert renamed == {f"vllm:{name}" for name in VLLM_METRICS}
