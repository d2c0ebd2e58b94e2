"""What the metrics of a gateway, a verifier or a drafter say about the last seconds.

Owns the names of the metrics that views show, and how their figures are written. None is written
as "-": nothing happened in the window.
"""

from collections.abc import Callable, Mapping

from tandem.cli.scraping import Snapshot, Window

# By kind of service, a metric that no other has.
_MARKS = {
    "gateway": "tandem_generation_tokens_total",
    "verifier": "tandem_kv_blocks_total",
    "drafter": "tandem_drafter_sequences",
}

Figures = Mapping[str, str]
"""Text by column title."""


def kind_of(snapshot: Snapshot) -> str | None:
    """The kind of service that has these metrics; None for a stranger."""
    return next((kind for kind, mark in _MARKS.items() if mark in snapshot), None)


def figures(kind: str, window: Window) -> Figures:
    """All figures of one service, by title."""
    return _FIGURES[kind](window)


def tokens_per_s(window: Window) -> str:
    return _number(window.rate("tandem_generation_tokens_total"))


def acceptance(window: Window) -> str:
    return _percent(
        window.ratio(
            "tandem_spec_decode_num_accepted_tokens_total",
            "tandem_spec_decode_num_draft_tokens_total",
        )
    )


def kv_used(snapshot: Snapshot) -> str:
    """The share of K/V blocks that sequences hold."""
    total = snapshot.total("tandem_kv_blocks_total")
    return _percent(snapshot.total("tandem_kv_blocks_used") / total if total else None)


def _gateway(window: Window) -> Figures:
    accepted = window.ratio(
        "tandem_spec_decode_num_accepted_tokens_total", "tandem_spec_decode_num_drafts_total"
    )
    return {
        "running": _count(window.new, "tandem_num_requests_running"),
        "waiting": _count(window.new, "tandem_num_requests_waiting"),
        "requests/s": _number(window.rate("tandem_requests_received_total")),
        "tokens/s": tokens_per_s(window),
        "accepted": acceptance(window),
        "acc. length": _number(None if accepted is None else 1 + accepted),
        "TTFT ms": _quantiles_ms(window, "tandem_time_to_first_token_seconds"),
        "ITL ms": _quantiles_ms(window, "tandem_inter_token_latency_seconds"),
        "shed/s": _number(window.rate("tandem_requests_shed_total")),
    }


def _verifier(window: Window) -> Figures:
    hits = window.ratio("tandem_prefix_cache_hits_total", "tandem_prefix_cache_queries_total")
    return {
        "running": _count(window.new, "tandem_verifier_sequences_running"),
        "waiting": _count(window.new, "tandem_verifier_sequences_waiting"),
        "K/V used": kv_used(window.new),
        "prefix hits": _percent(hits),
        "steps/s": _number(window.rate("tandem_step_duration_seconds_count", phase="forward")),
        "forward ms": _quantiles_ms(window, "tandem_step_duration_seconds", phase="forward"),
        "depth": _number(window.mean("tandem_speculation_depth")),
        "draft wait ms": _quantiles_ms(window, "tandem_draft_wait_seconds"),
        "preempted/s": _number(window.rate("tandem_preemptions_total")),
    }


def _drafter(window: Window) -> Figures:
    return {
        "sequences": _count(window.new, "tandem_drafter_sequences"),
        "history MiB": _number(window.new.total("tandem_drafter_history_bytes") / 2**20),
        "pools": _count(window.new, "tandem_drafter_pools"),
        "proposals/s": _number(window.rate("tandem_drafter_proposals_total")),
        "proposal ms": _quantiles_ms(window, "tandem_drafter_proposal_seconds"),
        "evicted/s": _number(window.rate("tandem_drafter_evictions_total")),
    }


_FIGURES: Mapping[str, Callable[[Window], Figures]] = {
    "gateway": _gateway,
    "verifier": _verifier,
    "drafter": _drafter,
}


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _count(snapshot: Snapshot, name: str) -> str:
    return f"{snapshot.total(name):.0f}"


def _quantiles_ms(window: Window, histogram: str, **labels: str) -> str:
    """Median and 99th percentile in milliseconds, as "4.1 / 12"."""
    found = [window.quantile(q, histogram, **labels) for q in (0.5, 0.99)]
    return " / ".join(_number(None if each is None else each * 1e3) for each in found)
