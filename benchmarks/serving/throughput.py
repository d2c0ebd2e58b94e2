"""Speeds of the whole stack beside others: the engine in process, OpenVINO, itself without drafts,
itself with a late drafter.
"""

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from benchmarks import delay_proxy
from benchmarks.peers.catalogue import PEERS, TANDEM
from benchmarks.peers.environments import InstallError, python_of
from benchmarks.peers.protocol import LOOKUP, SPECULATION
from benchmarks.peers.worker_process import PeerError
from benchmarks.ratios import Interval, interval, median_interval, ratios
from benchmarks.serving.setting import Setting
from benchmarks.serving.turns import Goal, Measure, RowResult, Variant, by_turns

IN_PROCESS_GOALS = {1: 0.85, 16: 0.9}
OPENVINO_GOALS = {1: 1.0, 16: 1.3}
OPENVINO_LOOKUPS = (5, 10, 20)
DELAYS_MS = (0, 2, 5, 20, 100)
HALF_GAIN_MS = 5
RANDOM_GOALS = dict.fromkeys((1, 16, 64), 0.98)
DELAY_GOALS = dict.fromkeys((1, 16), 0.98)
REPLICAS_STREAMS = (16, 64)


async def measure_in_process(setting: Setting) -> RowResult:
    """The whole stack over the engine with the drafter's kernel in one process."""
    _, client = await setting.stack()
    (peer,) = (peer for peer in PEERS if peer.name == TANDEM)
    measures, variants = [], []
    with setting.worker(Path(sys.executable), peer.worker) as worker:
        for streams, goal in setting.chosen(IN_PROCESS_GOALS).items():
            tasks = setting.renames(streams)
            services = setting.through_services(client, tasks, streams, speculate=True)
            engine = setting.through_worker(worker, SPECULATION, tasks, streams, name="in process")
            await by_turns([services, engine], setting.amount.rounds, setting.say)
            measures.append(
                Measure(
                    row="stack",
                    what="whole stack / engine in process, renames",
                    streams=streams,
                    dtype=setting.dtype,
                    value=median_interval(ratios(services.figures, engine.figures)),
                    goal=Goal(value=goal),
                    note=_speeds(services, engine),
                )
            )
            variants += [services, engine]
    return RowResult(measures=measures, variants=variants)


async def measure_openvino(setting: Setting) -> RowResult:
    """The whole stack over OpenVINO GenAI with its best prompt lookup."""
    what = "whole stack / OpenVINO's best prompt lookup, renames"
    _, client = await setting.stack()
    (peer,) = (peer for peer in PEERS if peer.name == "openvino")
    measures: list[Measure] = []
    variants: list[Variant] = []
    try:
        python = await asyncio.to_thread(python_of, peer, setting.cache, setting.say)
        with setting.worker(python, peer.worker) as worker:
            for streams, goal in setting.chosen(OPENVINO_GOALS).items():
                tasks = setting.renames(streams)
                services = setting.through_services(client, tasks, streams, speculate=True)
                lookups = [
                    setting.through_worker(
                        worker, f"{LOOKUP}{tokens}", tasks, streams, name=f"openvino, {tokens}"
                    )
                    for tokens in OPENVINO_LOOKUPS
                ]
                await by_turns([services, *lookups], setting.amount.rounds, setting.say)
                best = max(lookups, key=lambda lookup: lookup.median)
                measures.append(
                    Measure(
                        row="openvino",
                        what=what,
                        streams=streams,
                        dtype=setting.dtype,
                        value=median_interval(ratios(services.figures, best.figures)),
                        goal=Goal(value=goal) if setting.dtype == "float32" else None,
                        note=_speeds(services, best),
                    )
                )
                variants += [services, *lookups]
    except (InstallError, PeerError) as error:
        reason = str(error).strip().splitlines()[-1]
        setting.say(f"OpenVINO is left out: {error}")
        measures += [
            Measure(
                row="openvino",
                what=what,
                streams=streams,
                dtype=setting.dtype,
                value=None,
                note=f"not measured: {reason}",
            )
            for streams in list(setting.chosen(OPENVINO_GOALS))[len(measures) :]
        ]
    return RowResult(measures=measures, variants=variants)


async def measure_random(setting: Setting) -> RowResult:
    """Text that never repeats, with speculation over without, until the interval is narrow."""
    _, client = await setting.stack()
    vocab_size = json.loads((setting.model / "config.json").read_text())["vocab_size"]
    measures, variants = [], []
    for streams, goal in setting.chosen(RANDOM_GOALS).items():
        tasks = setting.random_texts(vocab_size, streams)
        on, off = (
            setting.through_services(
                client, tasks, streams, speculate=speculate, name=f"random text, {name}"
            )
            for name, speculate in (("on", True), ("off", False))
        )

        def is_narrow(on: Variant = on, off: Variant = off) -> bool:
            return (
                len(on.figures) >= setting.amount.rounds
                and median_interval(ratios(on.figures, off.figures)).half_width
                <= setting.amount.narrow
            )

        await by_turns([on, off], setting.amount.random_rounds, setting.say, is_narrow)
        measures.append(
            Measure(
                row="random",
                what="text that never repeats, on / off",
                streams=streams,
                dtype=setting.dtype,
                value=median_interval(ratios(on.figures, off.figures)),
                goal=Goal(value=goal),
                note=f"{_speeds(on, off)}, {len(on.figures)} rounds",
            )
        )
        variants += [on, off]
    return RowResult(measures=measures, variants=variants)


async def measure_replicas(setting: Setting) -> RowResult:
    """Two verifiers over one, with one model thread each, behind one gateway and one drafter."""
    _, one = await setting.stack()
    _, two = await setting.stack(num_verifiers=2)
    measures, variants = [], []
    for streams in REPLICAS_STREAMS:
        if streams not in setting.streams:
            continue
        tasks = setting.renames(4 * streams)
        both, single = (
            setting.through_services(client, tasks, streams, speculate=True, name=name)
            for client, name in ((two, "two verifiers"), (one, "one verifier"))
        )
        await by_turns([both, single], setting.amount.rounds, setting.say)
        measures.append(
            Measure(
                row="replicas",
                what="two verifiers / one, renames",
                streams=streams,
                dtype=setting.dtype,
                value=median_interval(ratios(both.figures, single.figures)),
                note=_speeds(both, single),
            )
        )
        variants += [both, single]
    return RowResult(measures=measures, variants=variants)


async def measure_delayed(setting: Setting) -> RowResult:
    """The drafter's answers delayed: speed over speculation off, and how much gain is left."""
    _, direct = await setting.stack()
    stack, client = await setting.stack(delays_drafter=True)
    measures: list[Measure] = []
    variants: list[Variant] = []
    for streams, goal in setting.chosen(DELAY_GOALS).items():
        tasks = setting.renames(streams)
        off = setting.through_services(client, tasks, streams, speculate=False, name="off")
        on = setting.through_services(direct, tasks, streams, speculate=True, name="no proxy")
        through = setting.through_services(client, tasks, streams, speculate=True)

        def delayed(delay_ms: int, streams: int = streams, through: Variant = through) -> Variant:
            async def turn() -> float:
                async with grpc.aio.insecure_channel(stack.drafter) as channel:
                    await delay_proxy.set_delay(channel, delay_ms / 1e3)
                return await through.turn()

            return Variant(name=f"delay {delay_ms} ms", streams=streams, turn=turn)

        late = {delay_ms: delayed(delay_ms) for delay_ms in DELAYS_MS}
        await by_turns([off, on, *late.values()], setting.amount.rounds, setting.say)
        best = ratios(on.figures, off.figures)
        for delay_ms, variant in late.items():
            gains = ratios(variant.figures, off.figures)
            share = _share(gains, best)
            measures.append(
                Measure(
                    row="delay",
                    what=f"drafter {delay_ms} ms late, on / off, renames",
                    streams=streams,
                    dtype=setting.dtype,
                    value=median_interval(gains),
                    goal=Goal(value=goal),
                    note=f"{share.median:.0%} of the gain that no delay brings "
                    f"({median_interval(best).median:.2f}); {_speeds(variant, off)}",
                )
            )
            if delay_ms == HALF_GAIN_MS:
                measures.append(
                    Measure(
                        row="delay",
                        what=f"drafter {delay_ms} ms late, share of the undelayed gain",
                        streams=streams,
                        dtype=setting.dtype,
                        value=share,
                        goal=Goal(value=0.5),
                    )
                )
        variants += [off, on, *late.values()]
    return RowResult(measures=measures, variants=variants)


def _share(gains: Sequence[float], best: Sequence[float]) -> Interval:
    """How much of the best ratio's gain over 1 is left, from the medians of the rounds."""

    def share(rounds: Sequence[int]) -> float:
        median, full = (statistics.median(each[i] for i in rounds) for each in (gains, best))
        return (median - 1) / (full - 1) if full > 1 else 0.0

    return interval(share, len(gains))


def _speeds(above: Variant, below: Variant) -> str:
    return f"{above.median:,.0f} and {below.median:,.0f} tokens/s ({above.name}, {below.name})"
