"""Processor time that verifier and gateway spend on drafts, per step of 64 sequences.

The verifier's model only waits (`benchmarks.paced_verifier`), so all its processor time is that of
serving. Counted is the time of all threads of both processes, without the engine's phases schedule
and verify and without the model, while nothing but decoding happens; with drafts less without. So
publishing what is decided, which happens in either case, does not count; what drafts add does:
feeding the drafter, taking its hints, reporting drafts, and about one more token per step. The
gateway serves token ids without text.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from benchmarks.metrics import read_metrics
from benchmarks.paced_verifier import CPU, MAX_MODEL_LEN, text
from benchmarks.ratios import median_interval
from benchmarks.services import Stack
from benchmarks.serving.setting import Setting
from benchmarks.serving.turns import Goal, Measure, RowResult, Variant, by_turns
from tandem.client import AsyncTandemClient, GenerationRequest, SpeculationParams

GOALS = {64: 0.5}
NOT_COUNTED = ("schedule", "model", "verify")
PROMPT_TOKENS = 256
# Output tokens of each sequence before the first reading: the drafter knows the text by then.
SETTLED_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Milliseconds of processor time per step."""

    verifier: float
    gateway: float


async def measure(setting: Setting) -> RowResult:
    stack, client = await setting.stack(
        verifier_module="benchmarks.paced_verifier", serves_text=False
    )
    measures: list[Measure] = []
    variants: list[Variant] = []
    for streams, goal in setting.chosen(GOALS).items():
        spent: dict[bool, list[Spent]] = {True: [], False: []}

        def variant(speculate: bool, streams: int, spent: list[Spent]) -> Variant:
            async def turn() -> float:
                async with decoding(client, streams, speculate=speculate):
                    spent.append(await _spent(stack, setting.amount.host_s))
                return spent[-1].verifier + spent[-1].gateway

            name = f"host, {'on' if speculate else 'off'}"
            return Variant(name=name, streams=streams, turn=turn, unit="ms/step")

        on, off = (variant(speculate, streams, spent[speculate]) for speculate in (True, False))
        await by_turns([on, off], setting.amount.rounds, setting.say)
        differences = [a - b for a, b in zip(on.figures, off.figures, strict=True)]
        verifier_on, gateway_on, verifier_off, gateway_off = (
            statistics.median(getattr(each, name) for each in spent[speculate][1:])
            for speculate in (True, False)
            for name in ("verifier", "gateway")
        )
        measures.append(
            Measure(
                row="host",
                what="host time per step for drafts, verifier and gateway, on less off",
                streams=streams,
                dtype="any",
                value=median_interval(differences),
                unit="ms",
                goal=Goal(value=goal, is_most=True),
                note=f"verifier {verifier_on:.2f} less {verifier_off:.2f}, "
                f"gateway {gateway_on:.2f} less {gateway_off:.2f} ms",
            )
        )
        variants += [on, off]
    return RowResult(measures=measures, variants=variants)


async def _spent(stack: Stack, duration_s: float) -> Spent:
    """Measures for a while."""
    pids = {name: stack.services[name].pid for name in ("verifier", "gateway")}
    address = stack.services["verifier"].metrics
    before = await asyncio.to_thread(read_metrics, address)
    cpu_before_s = {name: cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(duration_s)
    spent_s = {name: cpu_s(pid) - cpu_before_s[name] for name, pid in pids.items()}
    after = await asyncio.to_thread(read_metrics, address)
    not_counted_s = sum(
        each.total("tandem_step_duration_seconds_sum", phase=phase + CPU) * sign
        for each, sign in ((after, 1), (before, -1))
        for phase in NOT_COUNTED
    )
    num_steps = after.total("tandem_step_tokens_count") - before.total("tandem_step_tokens_count")
    return Spent(
        verifier=(spent_s["verifier"] - not_counted_s) / num_steps * 1e3,
        gateway=spent_s["gateway"] / num_steps * 1e3,
    )


@contextlib.asynccontextmanager
async def decoding(
    client: AsyncTandemClient, streams: int, *, speculate: bool
) -> AsyncIterator[None]:
    """Inside, so many sequences decode and nothing else happens; cancels them at the end."""
    prompt = text(PROMPT_TOKENS).tolist()
    num_settled = 0
    settled = asyncio.Event()

    async def one_stream() -> None:
        nonlocal num_settled
        request = GenerationRequest(
            prompt=prompt,
            max_new_tokens=MAX_MODEL_LEN - PROMPT_TOKENS,
            speculation=SpeculationParams(enabled=speculate),
        )
        num_tokens = 0
        async with contextlib.aclosing(client.stream(request)) as events:
            async for event in events:
                was_settled = num_tokens >= SETTLED_TOKENS
                num_tokens += len(getattr(event, "token_ids", ()))
                if num_tokens >= SETTLED_TOKENS and not was_settled:
                    num_settled += 1
                    if num_settled == streams:
                        settled.set()

    tasks = [asyncio.create_task(one_stream()) for _ in range(streams)]
    try:
        waiting = asyncio.create_task(settled.wait())
        done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if waiting not in done:
            done.pop().result()
            raise AssertionError("a sequence ended before all were settled")
        yield
    finally:
        for task in [waiting, *tasks]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def cpu_s(pid: int) -> float:
    """Processor time of a process's threads so far, also of those that have ended.

    By the process's own clock: /proc counts in hundredths of a second, too coarse for a short turn.
    """
    # What clock_getcpuclockid() returns on Linux, which Python does not have.
    return time.clock_gettime((~pid << 3) | 2)
