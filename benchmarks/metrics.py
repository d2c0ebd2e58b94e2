"""A service's metrics, read from its port while it runs."""

import urllib.request

from tandem.cli.scraping import Snapshot, parse

# On a busy machine a service may take its time: longer than `tandem top` waits.
_TIMEOUT_S = 10.0


def read_metrics(address: str) -> Snapshot:
    """Reads a metrics port, HOST:PORT; blocks some milliseconds.

    Raises:
        OSError: it does not answer.
    """
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as response:
        return parse(response.read().decode())
