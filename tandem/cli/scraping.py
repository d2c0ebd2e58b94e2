"""Metrics of services: fetched over HTTP, and compared over a window of time.

Knows Prometheus' text format and no metric's name.
"""

import collections
import itertools
import math
import queue
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.client import BadStatusLine, HTTPException

from prometheus_client.parser import text_string_to_metric_families

_MAX_BYTES = 16 << 20
_TIMEOUT_S = 5.0
_CHUNK_BYTES = 64 << 10

# By URL: what still reads an answer that was given up.
_unended: dict[str, threading.Thread] = {}


class ScrapeError(Exception):
    """A service did not answer with metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All samples of one service at one moment."""

    taken_at_s: float
    """By this process's monotonic clock."""
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)
    """By name: labels and value of each."""

    def __contains__(self, name: str) -> bool:
        return name in self.samples

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 if there is none."""
        return sum(
            value for found, value in self.samples.get(name, ()) if labels.items() <= found.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened between two snapshots of one service."""

    old: Snapshot
    new: Snapshot

    def increase(self, name: str, **labels: str) -> float:
        """Of a counter; one that was reset has counted from 0."""
        before, after = self.old.total(name, **labels), self.new.total(name, **labels)
        return after - before if after >= before else after

    def rate(self, name: str, **labels: str) -> float | None:
        """Increase per second; None in a window without length."""
        seconds = self.new.taken_at_s - self.old.taken_at_s
        return self.increase(name, **labels) / seconds if seconds > 0 else None

    def ratio(self, part: str, whole: str) -> float | None:
        """The increase of one counter by that of another; None if that is 0."""
        increase = self.increase(whole)
        return self.increase(part) / increase if increase else None

    def mean(self, histogram: str) -> float | None:
        """Of the values observed in the window; None without any."""
        return self.ratio(f"{histogram}_sum", f"{histogram}_count")

    def quantile(self, q: float, histogram: str, **labels: str) -> float | None:
        """Of the values observed in the window, interpolated within a bucket; None without any."""
        buckets = f"{histogram}_bucket"
        bounds = sorted(
            {
                (bound, found["le"])
                for found, _ in self.new.samples.get(buckets, ())
                if labels.items() <= found.items() and (bound := _bound(found)) is not None
            }
        )
        counts = [self.increase(buckets, le=text, **labels) for _, text in bounds]
        if not counts or not counts[-1]:
            return None
        wanted = q * counts[-1]
        lower = 0.0
        for (bound, _), (before, count) in zip(
            bounds, itertools.pairwise([0.0, *counts]), strict=True
        ):
            if count >= wanted and count > before:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * (wanted - before) / (count - before)
            lower = bound
        return lower


# Kept of one window, about.
_MOST_SNAPSHOTS = 60


class History:
    """The snapshots of one service that a window of some seconds needs: the latest, and before it
    about one for each sixtieth of the window, however often they are taken.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._snapshots: collections.deque[Snapshot] = collections.deque()

    @property
    def window(self) -> Window | None:
        """Up to the latest snapshot; None without any."""
        if not self._snapshots:
            return None
        return Window(old=self._snapshots[0], new=self._snapshots[-1])

    def add(self, new: Snapshot) -> None:
        """Drops what lies further back than the window; the last two always stay."""
        kept = self._snapshots
        if (
            len(kept) > 2
            and kept[-1].taken_at_s - kept[-2].taken_at_s < self._window_s / _MOST_SNAPSHOTS
        ):
            kept.pop()
        kept.append(new)
        while len(kept) > 2 and new.taken_at_s - kept[1].taken_at_s >= self._window_s:
            kept.popleft()

    def clear(self) -> None:
        self._snapshots.clear()


def metrics_url(address: str) -> str:
    """The URL of HOST:PORT or of a base URL.

    Raises:
        ValueError: it is neither.
    """
    url = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{address!r} is no HOST:PORT and no URL of HTTP")
    if "://" not in address and url.port is None:  # `port` itself refuses what is no number
        raise ValueError(f"{address!r} has no port")
    return url._replace(path=url.path if url.path.strip("/") else "/metrics").geturl()


def scrape(url: str, tls: ssl.SSLContext | None = None) -> Snapshot:
    """Fetches and parses the metrics, within some seconds.

    Raises:
        ScrapeError: there are none.
    """
    return parse(fetch(url, tls))


def fetch(url: str, tls: ssl.SSLContext | None = None) -> str:
    """Returns the text at a URL.

    Raises:
        ScrapeError: there is none, or it is too long or too slow.
    """
    too_slow = f"the answer took longer than {_TIMEOUT_S:g} s"
    if url in _unended and _unended[url].is_alive():
        # One more would take one more thread and connection each time.
        raise ScrapeError(too_slow)
    outcomes: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def put() -> None:
        try:
            outcomes.put(_fetch(url, tls))
        except Exception as error:
            outcomes.put(error)

    # Nothing else ends a wait for a head that comes byte by byte: the timeout is that of one byte.
    thread = threading.Thread(target=put, name="fetch", daemon=True)
    thread.start()
    try:
        outcome = outcomes.get(timeout=_TIMEOUT_S)
    except queue.Empty:
        _unended[url] = thread
        raise ScrapeError(too_slow) from None
    try:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
    finally:
        # A cycle of the exception and this frame would keep its socket open for a while.
        del outcome


def _fetch(url: str, tls: ssl.SSLContext | None) -> str:
    """As `fetch`, but a slow head takes as long as it takes."""
    # The environment's HTTP proxy is meant for the internet, not for services.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    handlers += [urllib.request.HTTPSHandler(context=tls)] if tls else []
    opener = urllib.request.build_opener(*handlers)
    deadline_s = time.monotonic() + _TIMEOUT_S
    content = bytearray()
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as response:
            while chunk := response.read1(_CHUNK_BYTES):
                content += chunk
                if len(content) > _MAX_BYTES:
                    raise ScrapeError(f"the answer is longer than {_MAX_BYTES >> 20} MiB")
                if time.monotonic() > deadline_s:
                    raise ScrapeError(f"the answer took longer than {_TIMEOUT_S:g} s")
            if response.length:
                raise ScrapeError("the answer was cut off")
        return content.decode()
    except urllib.error.URLError as error:
        reason = error.reason
        raise ScrapeError(getattr(reason, "strerror", None) or str(reason)) from error
    except BadStatusLine as error:
        # Its text is what came instead, or that nothing came.
        raise ScrapeError("no answer in HTTP, as from a port for gRPC or for https://") from error
    except (OSError, HTTPException, ValueError) as error:
        raise ScrapeError(str(error) or type(error).__name__) from error


def parse(text: str) -> Snapshot:
    """The samples of a text of metrics.

    Raises:
        ScrapeError: it is none.
    """
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for sample in _samples(text):
            samples.setdefault(sample[0], []).append(sample[1:])
    except (ValueError, IndexError, KeyError) as error:
        raise ScrapeError(f"the answer holds no metrics: {error}") from error
    return Snapshot(taken_at_s=time.monotonic(), samples=samples)


def _bound(labels: Mapping[str, str]) -> float | None:
    """Of a histogram's bucket; None if the labels do not say it: any server may have sent them."""
    try:
        bound = float(labels["le"])
    except (KeyError, ValueError):
        return None
    return None if math.isnan(bound) else bound


def _samples(text: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value
