"""A Prometheus on this machine that scrapes given targets, with Tandem's configuration and rules.

For tests, and for the pictures in the docs. Needs the `prometheus` binary; Debian packages it.
"""

import contextlib
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 20.0
_POLL_INTERVAL_S = 0.1


class PrometheusError(Exception):
    """Prometheus did not start, or refused a query; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values of one series: (Unix seconds, value), ascending; an instant query has one."""

    labels: Mapping[str, str]
    values: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus; `address` is HOST:PORT."""

    address: str

    def query(self, expression: str) -> list[Series]:
        """The expression's present value.

        Raises:
            PrometheusError: the expression cannot be evaluated.
        """
        found = self._get("query", query=expression)["result"]
        return [_series(one["metric"], [one["value"]]) for one in found]

    def query_range(
        self, expression: str, *, start_s: float, end_s: float, step_s: float
    ) -> list[Series]:
        """The expression's values over a time, in steps.

        Raises:
            PrometheusError: the expression cannot be evaluated.
        """
        found = self._get("query_range", query=expression, start=start_s, end=end_s, step=step_s)
        return [_series(one["metric"], one["values"]) for one in found["result"]]

    def alerts(self) -> set[tuple[str, str, str]]:
        """(name, job or "", state) of the alerts that are pending or firing."""
        return {
            (alert["labels"]["alertname"], alert["labels"].get("job", ""), alert["state"])
            for alert in self._get("alerts")["alerts"]
        }

    def _get(self, endpoint: str, **parameters: object) -> Any:
        url = f"http://{self.address}/api/v1/{endpoint}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_ANSWER_TIMEOUT_S) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise PrometheusError(f"{parameters}: {error.read().decode()}") from None


@contextlib.contextmanager
def running_prometheus(
    targets: Mapping[str, Sequence[str]],
    *,
    folder: Path,
    interval_s: int,
    minutes_as_seconds: bool = False,
    window_s: int = 300,
) -> Iterator[Prometheus]:
    """Starts a Prometheus with `prometheus.yml`, except for the targets.

    Args:
        targets: addresses of metrics by job.
        folder: an empty folder for its files.
        interval_s: how often it scrapes and evaluates.
        minutes_as_seconds: whether alerts wait seconds instead of minutes.
        window_s: of the rules that look back for five minutes.

    Raises:
        PrometheusError: it ended before it was ready.
    """
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {
        "scrape_interval": f"{interval_s}s",
        "scrape_timeout": f"{interval_s}s",
        "evaluation_interval": f"{interval_s}s",
    }
    for job in config["scrape_configs"]:
        job.pop("dns_sd_configs")
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    for name in config["rule_files"]:
        rules = (FOLDER / name).read_text()
        if minutes_as_seconds:
            rules = re.sub(r"(for: \d+)m$", r"\1s", rules, flags=re.MULTILINE)
        (folder / name).write_text(rules.replace("[5m]", f"[{window_s}s]"))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL)
    try:
        yield Prometheus(_wait_until_ready(process, log))
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        found = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
        if found is not None and _answers(found[1]):
            return found[1]
        time.sleep(_POLL_INTERVAL_S)
    raise PrometheusError(log.read_text())


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=_ANSWER_TIMEOUT_S):
            return True
    except OSError:
        return False


def _series(labels: Mapping[str, str], values: Sequence[tuple[float, str]]) -> Series:
    return Series(labels=labels, values=[(at_s, float(value)) for at_s, value in values])
