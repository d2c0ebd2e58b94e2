"""Speeds of the whole stack beside others: the engine in process, itself without drafts, itself
with two verifiers or with many drafters.
"""

import json
from collections.abc import AsyncIterator

from benchmarks.client_load import through_services
from benchmarks.in_process import InProcessEngine, through_engine
from benchmarks.ratios import median_interval, ratios
from benchmarks.report import Goal, Measure, ratio
from benchmarks.serving.setting import Setting
from benchmarks.turns import by_turns
from tandem.client import SpeculationParams
from verifier.config import VerifierConfig

STACK_GOALS = {1: 0.85, 16: 0.9}
RANDOM_GOAL = 0.98
ON, OFF = SpeculationParams(), SpeculationParams(enabled=False)


async def measure_stack(setting: Setting) -> AsyncIterator[Measure]:
    """The whole stack over the engine with the drafter's kernel in this process."""
    _, client = await setting.stack()
    config = VerifierConfig.model_validate(
        {
            "model": setting.model,
            "device": "cpu",
            "dtype": setting.dtype,
            "threads": setting.threads,
            "prefix_cache": False,
        }
    )
    with InProcessEngine(config).started() as engine:
        for streams in setting.streams:
            tasks = setting.renames(streams)
            services = through_services(client, tasks, streams, speculation=ON)
            alone = through_engine(engine, tasks, streams, speculate=True)
            await by_turns([services, alone], setting.amount.rounds)
            goal = STACK_GOALS.get(streams)
            yield ratio(
                "stack",
                "whole stack / engine in process, renames",
                services,
                alone,
                dtype=setting.dtype,
                goal=None if goal is None else Goal(value=goal),
            )


async def measure_random(setting: Setting) -> AsyncIterator[Measure]:
    """Text that never repeats, with speculation over without, until the interval is narrow."""
    _, client = await setting.stack()
    vocab_size = json.loads((setting.model / "config.json").read_text())["vocab_size"]
    for streams in setting.streams:
        tasks = setting.random_texts(vocab_size, streams)
        on = through_services(client, tasks, streams, name="on", speculation=ON)
        off = through_services(client, tasks, streams, name="off", speculation=OFF)

        def is_narrow(on: list[float] = on.figures, off: list[float] = off.figures) -> bool:
            return (
                len(on) >= setting.amount.rounds
                and median_interval(ratios(on, off)).half_width <= setting.amount.narrow
            )

        await by_turns([on, off], setting.amount.random_rounds, is_narrow)
        yield ratio(
            "random",
            "text that never repeats, on / off",
            on,
            off,
            dtype=setting.dtype,
            goal=Goal(value=RANDOM_GOAL),
            note=f"{len(on.figures)} rounds",
        )


async def measure_replicas(setting: Setting) -> AsyncIterator[Measure]:
    """Two verifiers over one, with one model thread each, behind one gateway and one drafter."""
    _, one = await setting.stack()
    _, two = await setting.stack(num_verifiers=2)
    for streams in setting.streams:
        tasks = setting.renames(4 * streams)
        both = through_services(two, tasks, streams, name="two verifiers", speculation=ON)
        single = through_services(one, tasks, streams, name="one verifier", speculation=ON)
        await by_turns([both, single], setting.amount.rounds)
        yield ratio("replicas", "two verifiers / one, renames", both, single, dtype=setting.dtype)


async def measure_drafters(setting: Setting) -> AsyncIterator[Measure]:
    """Many drafters over one: a verifier's step sends no more messages to more of them."""
    number = setting.amount.drafters
    _, one = await setting.stack()
    _, several = await setting.stack(num_drafters=number)
    for streams in setting.streams:
        tasks = setting.renames(streams)
        name = f"{number} drafters"
        many = through_services(several, tasks, streams, name=name, speculation=ON)
        single = through_services(one, tasks, streams, name="one drafter", speculation=ON)
        await by_turns([many, single], setting.amount.rounds)
        yield ratio("drafters", f"{name} / one, renames", many, single, dtype=setting.dtype)
