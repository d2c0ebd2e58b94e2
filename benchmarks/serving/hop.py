"""The hop that a step waits for, over a bare echo from a busy thread."""

import asyncio
import json
import statistics
import sys
from dataclasses import dataclass

from benchmarks.drafter_wire import Steps
from benchmarks.metrics import Snapshot, Window, read_metrics
from benchmarks.ratios import median_interval, ratios
from benchmarks.services import REPOSITORY
from benchmarks.serving.setting import Setting, pinned
from benchmarks.serving.turns import Goal, Measure, RowResult, Variant, by_turns
from tandem.v1 import drafter_pb2 as pb
from verifier.drafts.draft_wait import HOPS_KEPT

GOALS = {1: 1.6, 16: 2.0, 64: 3.0}
HINT_TOKENS = 31
# A step of 64 sequences takes longer; then fewer echoes would be measured in a turn's time.
_LONGEST_ECHO_STEP_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Of the steps between two readings."""

    p50_s: float
    p99_s: float
    # Share of the waits whose hint came in time; None: not exported.
    paid_share: float | None
    mean_step_s: float


def hop_between(before: Snapshot, after: Snapshot) -> Hop:
    """The awaited hop, as the verifier exports it.

    From its gauges where all hops that they are of came in between, else from the histogram, as
    exact as its buckets.
    """
    window = Window(old=before, new=after)
    gauges = {
        labels["quantile"]: value
        for labels, value in after.samples.get("tandem_draft_hop_quantile_seconds", ())
    }
    if not gauges or window.increase("tandem_draft_hop_seconds_count") < HOPS_KEPT:
        gauges = {
            q: window.quantile(float(q), "tandem_draft_hop_seconds") or 0.0 for q in ("0.5", "0.99")
        }
    paid = window.increase("tandem_draft_waits_total", outcome="paid")
    waits = window.increase("tandem_draft_waits_total")
    num_steps = window.increase("tandem_step_tokens_count")
    return Hop(
        p50_s=gauges["0.5"],
        p99_s=gauges["0.99"],
        paid_share=paid / waits if waits else None,
        mean_step_s=window.increase("tandem_step_duration_seconds_sum") / max(1.0, num_steps),
    )


async def measure(setting: Setting) -> RowResult:
    stack, client = await setting.stack()
    verifier = stack.services["verifier"].metrics
    echo_server = setting.service("benchmarks.echo_server", "echo").address
    measures: list[Measure] = []
    variants: list[Variant] = []
    for streams, goal in setting.chosen(GOALS).items():
        hops: list[Hop] = []
        echo_p99s_ms: list[float] = []
        load = setting.through_services(client, setting.renames(streams), streams, speculate=True)

        async def hop_turn(load: Variant = load, hops: list[Hop] = hops) -> float:
            before = await asyncio.to_thread(read_metrics, verifier)
            for _ in range(setting.amount.most_hop_loads):
                await load.turn()
                after = await asyncio.to_thread(read_metrics, verifier)
                window = Window(old=before, new=after)
                if window.increase("tandem_draft_hop_seconds_count") >= HOPS_KEPT:
                    break
            hops.append(hop_between(before, after))
            return hops[-1].p50_s * 1e3

        async def echo_turn(
            streams: int = streams, hops: list[Hop] = hops, p99s_ms: list[float] = echo_p99s_ms
        ) -> float:
            step_s = min(hops[-1].mean_step_s, _LONGEST_ECHO_STEP_S)
            took_s = await _echo(setting, echo_server, streams, step_s)
            p99s_ms.append(statistics.quantiles(took_s, n=100)[98] * 1e3)
            return statistics.median(took_s) * 1e3

        hop = Variant(name="hop, p50", streams=streams, turn=hop_turn, unit="ms")
        echo = Variant(name="echo, p50", streams=streams, turn=echo_turn, unit="ms")
        # The echo works as long as the steps did that ran before it.
        await by_turns([hop, echo], setting.amount.rounds, setting.say)
        # Without the warm-up.
        p99_ms = statistics.median(each.p99_s for each in hops[1:]) * 1e3
        paid = [each.paid_share for each in hops[1:] if each.paid_share is not None]
        measures.append(
            Measure(
                row="hop",
                what="awaited hop p50 / echo p50",
                streams=streams,
                dtype=setting.dtype,
                value=median_interval(ratios(hop.figures, echo.figures)),
                goal=Goal(value=goal, is_most=True),
                note=f"hop {hop.median:.2f} ms (p99 {p99_ms:.2f}), echo {echo.median:.2f} ms "
                f"(p99 {statistics.median(echo_p99s_ms[1:]):.2f})"
                + (f", {statistics.median(paid):.0%} of the waits paid" if paid else ""),
            )
        )
        variants += [hop, echo]
    return RowResult(measures=measures, variants=variants)


async def _echo(setting: Setting, server: str, num_sequences: int, step_s: float) -> list[float]:
    """Seconds of each echo, of messages as large as a batch's."""
    request_bytes, response_bytes = batch_bytes(num_sequences)
    with pinned(0 if setting.pins else None):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.busy_echo", "--server", server),
            *("--step-us", str(step_s * 1e6), "--count", str(setting.amount.echoes)),
            *("--request-bytes", str(request_bytes), "--response-bytes", str(response_bytes)),
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE,
        )
    output, _ = await process.communicate()
    took_s: list[float] = json.loads(output)
    return took_s


def batch_bytes(num_sequences: int) -> tuple[int, int]:
    """Bytes of a step's message to the drafter, and of its answer."""
    steps = Steps("echo", num_sequences)
    request = next(steps)
    answer = pb.ProposeResponse(
        batch_id=1,
        proposals=[
            pb.Proposal(
                sequence_id=delta.sequence_id,
                base_length=delta.base_length,
                token_ids=range(1000, 1000 + HINT_TOKENS),
                matched_ngram_length=8,
                source=pb.SOURCE_SEQUENCE,
                status=pb.STATUS_OK,
            )
            for delta in pb.ProposeRequest.FromString(request).sequences
        ],
    )
    return len(request), answer.ByteSize()
