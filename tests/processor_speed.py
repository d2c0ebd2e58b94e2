"""How slow the processor is now, for limits on processor time that a test states in seconds."""

import statistics
import time

# On the machine that the limits were set on (AMD EPYC, 2 cores).
_REFERENCE_S = 0.0042


def slowness() -> float:
    """Processor time that some work takes here and now, over the reference; at least 1."""
    durations_s = []
    for _ in range(5):
        started_at_s = time.thread_time()
        sorted(map(str, range(30_000)))
        durations_s.append(time.thread_time() - started_at_s)
    return max(1.0, statistics.median(durations_s) / _REFERENCE_S)
