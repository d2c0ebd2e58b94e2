"""The engine without drafts beside transformers' own generation, on the same device."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.bench import Bench, variant
from benchmarks.gpu.engines import tasks_for
from benchmarks.gpu.texts import replays
from benchmarks.serving.turns import Goal, Measure, Variant
from benchmarks.transformers_baseline import generate, generate_batch
from benchmarks.workloads import Task

BATCHING, COMPILED = "continuous batching", "compiled generate"
GOALS = {BATCHING: 2.0, COMPILED: 1.5}


async def measure(bench: Bench) -> list[Measure]:
    """Each peer runs the same prompts for the same numbers of tokens, all of one length: a compiled
    graph serves one length. The weights' own text, so nothing is replayed.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        bench.checkpoint(bench.size.small), dtype=bench.size.dtype
    )
    model: PreTrainedModel = loaded.to(bench.device).eval()
    measures = []
    with bench.engine(bench.size.small, replays=False) as engine:
        for streams in bench.size.streams[:2]:
            tasks = of_one_length(
                tasks_for(replays(bench.size.max_new_tokens), streams), bench.size.max_new_tokens
            )
            own = bench.generating("Tandem, off", engine, tasks, streams, speculate=False)
            for name, run in _runs(model, tasks, streams).items():
                measures.append(await _against(bench, own, name, run))
                # Its cache takes what memory is free.
                loaded.destroy_cached_continuous_batching_manager()
    return measures


def of_one_length(tasks: Sequence[Task], max_new_tokens: int) -> list[Task]:
    """The prompts cut to the shortest one's length, each continued by as many tokens."""
    shortest = min(len(task.prompt_token_ids) for task in tasks)
    return [
        Task(prompt_token_ids=task.prompt_token_ids[:shortest], max_new_tokens=max_new_tokens)
        for task in tasks
    ]


def _runs(
    model: PreTrainedModel, tasks: Sequence[Task], streams: int
) -> dict[str, Callable[[], int]]:
    """Each peer; returns the number of output tokens.

    A fixed cache makes transformers compile the decode step, on a GPU only.
    """
    return {
        # Its cache and its graphs are kept from one turn to the next.
        BATCHING: lambda: generate_batch(model, tasks, persistent_manager=True),
        COMPILED: lambda: generate(model, tasks, streams, cache_implementation="static"),
    }


async def _against(bench: Bench, own: Variant, name: str, run: Callable[[], int]) -> Measure:
    what = f"{bench.size.small.name}: Tandem without drafts / transformers' {name}"
    own.figures.clear()

    def tokens_per_s() -> float:
        started_at_s = time.perf_counter()
        return run() / (time.perf_counter() - started_at_s)

    peer = variant(name, own.streams, tokens_per_s)
    try:
        await bench.compare(own, peer)
    except torch.AcceleratorError:
        raise  # nothing runs on the device after it
    except Exception as error:
        # Another project's code: it may fail in any way, and says why.
        note = f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return bench.measure("transformers", what, own.streams, None, note=note)
    return bench.ratio("transformers", what, own, peer, Goal(value=GOALS[name]))
