"""A real Prometheus with the real rules scrapes a real Tandem under load.

The gateway's own counters are the oracle of the acceptance rate. Every query of every dashboard
must return numbers.
"""

import asyncio
import collections
import math
import os
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client_load import run_tasks
from benchmarks.workloads import BUNDLED_MODEL, random_tasks, rename_tasks
from deploy.grafana.generate import DASHBOARDS
from deploy.grafana.panels import without_variables
from deploy.prometheus.live_tandem import LiveTandem, live_tandem
from deploy.prometheus.local_prometheus import Prometheus, running_prometheus
from tandem.client import AsyncTandemClient, SpeculationParams, TlsOptions, Usage
from tests.deploy.monitoring.rules import recorded
from tests.deploy.monitoring.test_metric_names import make_certificate

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TANDEM_TEST_DEPLOY") != "1",
        reason="takes half a minute; TANDEM_TEST_DEPLOY=1 turns it on, `make test-deploy` does",
    ),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="no prometheus on this machine; `make test-deploy` installs it, as root",
    ),
    pytest.mark.timeout(300),
]

QUERIES = {
    f"{dashboard.uid}: {panel.title}: {query.legend}": query.expression
    for dashboard in DASHBOARDS
    for panel in dashboard.panels()
    for query in panel.queries
}

# Alerts that the death of a process may cause.
OF_DEATH = {
    "TandemServiceGone",
    "TandemNoProgress",
    "TandemVerifierUnreachable",
    "TandemDrafterAbsent",
    "TandemDrafterUnreachable",
    "TandemStepsStalled",
}


@dataclass(frozen=True, slots=True)
class Live:
    """Tandem, its Prometheus, and the gateway's counts after the load."""

    tandem: LiveTandem
    prometheus: Prometheus
    counted: dict[str, float]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    paths = make_certificate(folder)
    cert, key, ca = str(paths["cert"]), str(paths["key"]), str(paths["ca"])
    served = ["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca]
    peers = ["--peer-tls-ca", ca, "--peer-tls-cert", cert, "--peer-tls-key", key]
    flags = {
        "drafter": served,
        "verifier": [*served, *peers],
        "gateway": [*served, *peers],
    }
    (folder / "prometheus").mkdir()
    with (
        live_tandem(flags) as tandem,
        running_prometheus(
            tandem.targets(), folder=folder / "prometheus", interval_s=1, minutes_as_seconds=True
        ) as prometheus,
    ):
        # The first sample of every counter precedes the load, so no increase is missed.
        drafted = "tandem_spec_decode_num_draft_tokens_total"
        until(lambda: len(prometheus.query('up{job=~"tandem-.+"} == 1')) == 4)
        until(lambda: [s.values[0][1] for s in prometheus.query(drafted)] == [0])
        tasks = [
            *rename_tasks(BUNDLED_MODEL, 12),
            *random_tasks(1024, 3, max_new_tokens=32),
        ]
        tls = TlsOptions(ca=paths["ca"], certificate=paths["cert"], key=paths["key"])

        async def run() -> Sequence[Usage]:
            async with AsyncTandemClient(tandem.gateway.address, tls=tls) as client:
                return (await run_tasks(client, tasks, 4, SpeculationParams()))[1]

        usages = asyncio.run(run())
        assert len(usages) == len(tasks)
        counted = scrape_totals(tandem.gateway.metrics)
        assert counted[drafted] == sum(usage.num_draft_tokens for usage in usages) > 0
        until(lambda: [s.values[0][1] for s in prometheus.query(drafted)] == [counted[drafted]])
        yield Live(tandem, prometheus, counted)


def test_the_recorded_acceptance_rate_follows_the_gateways_counters(live: Live) -> None:
    drafted = live.counted["tandem_spec_decode_num_draft_tokens_total"]
    accepted = live.counted["tandem_spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted < drafted

    def found() -> list[float]:
        series = live.prometheus.query("tandem:spec_decode_acceptance:ratio_rate5m")
        return [one.values[0][1] for one in series]

    # Evaluated after the counters' last samples.
    until(lambda: found() == [pytest.approx(accepted / drafted, rel=1e-9)], or_show=found)


@pytest.mark.parametrize("name", QUERIES)
def test_every_query_of_every_dashboard_returns_numbers(live: Live, name: str) -> None:
    expression = without_variables(QUERIES[name], "4m")

    def found() -> list[float]:
        return [one.values[0][1] for one in live.prometheus.query(expression)]

    # Rules and rates need some scrapes after the last sample.
    until(lambda: not all(map(math.isnan, found())), or_show=lambda: expression)


@pytest.mark.parametrize("name", recorded())
def test_every_recording_rule_records(live: Live, name: str) -> None:
    def found() -> list[float]:
        return [one.values[0][1] for one in live.prometheus.query(name)]

    until(lambda: bool(found()))
    assert all(map(math.isfinite, found()))


@pytest.mark.parametrize(
    ("connected", "counts"),
    [
        ('tandem_peers_connected{kind="drafter"}', [1]),
        ('tandem_verifier_drafters{state="up"}', [1, 1]),
    ],
)
def test_the_verifiers_connections_to_their_drafter_are_shown(
    live: Live, connected: str, counts: Sequence[float]
) -> None:
    assert [series.values[0][1] for series in live.prometheus.query(connected)] == counts


def test_a_killed_service_fires_its_own_alerts_only(live: Live) -> None:
    # The last test: it kills the drafter. Alerts wait seconds here instead of minutes.
    assert not {alert for alert in live.prometheus.alerts() if alert[0] in OF_DEATH}
    live.tandem.drafter.process.kill()
    firing = {("TandemDrafterAbsent", "", "firing")}
    until(lambda: live.prometheus.alerts() >= firing, or_show=live.prometheus.alerts)
    assert {alert for alert in live.prometheus.alerts() if alert[0] in OF_DEATH} == firing


def scrape_totals(address: str) -> dict[str, float]:
    """The sums of a service's samples, by name."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        families = text_string_to_metric_families(response.read().decode())
        samples = [sample for family in families for sample in family.samples]
    totals: dict[str, float] = collections.defaultdict(float)
    for sample in samples:
        totals[sample.name] += sample.value
    return totals


def until(
    condition: Callable[[], bool], *, or_show: Callable[[], object] = lambda: "it did not come"
) -> None:
    """Polls until Prometheus' next scrapes show the expected."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, or_show()
        time.sleep(0.2)
