"""The engine without drafts beside transformers' own generation, on the same device."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.bench import Bench, counting_down, variant
from benchmarks.gpu.engines import tasks_for
from benchmarks.gpu.texts import replays
from benchmarks.serving.turns import Goal, Measure, Variant
from benchmarks.transformers_baseline import generate, generate_batch
from benchmarks.workloads import Task

BATCHING, COMPILED = "continuous batching", "compiled generate"
# In this order: continuous batching takes longest.
GOALS = {COMPILED: 1.5, BATCHING: 2.0}
# One in so many of the tokens that a turn elsewhere makes: continuous batching takes 100 ms a step.
_TOKENS_DIVISORS = {COMPILED: 2, BATCHING: 4}
# Of free memory for the K/V of continuous batching; on a CPU, touching it takes longer than all.
_MEMORY_SHARES = {"cuda": 0.3, "cpu": 0.01}


async def measure(bench: Bench) -> AsyncIterator[Measure]:
    """Each peer runs Tandem's prompts for the same numbers of tokens, all of one length: a compiled
    graph serves one length. The weights' own text, so nothing is replayed.
    """
    folder = bench.checkpoint(bench.size.small)
    with bench.loading():
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=bench.size.dtype)
        model: PreTrainedModel = loaded.to(bench.device).eval()
    all_streams = bench.size.streams[:2]
    with bench.engine(bench.size.small, replays=False) as engine:
        pairs = [(name, streams) for name in GOALS for streams in all_streams]
        for num_left, (name, streams) in counting_down(pairs):
            num_tokens = bench.size.max_new_tokens // _TOKENS_DIVISORS[name]
            # A task a stream: a peer may take its time.
            tasks = of_one_length(tasks_for(replays(num_tokens), streams)[:streams], num_tokens)
            own = bench.generating("Tandem, off", engine, tasks, streams, speculate=False)
            run = _runs(model, tasks, streams, bench.size.max_num_batched_tokens)[name]
            yield await _against(bench, own, name, run, tasks, num_left)
            # Continuous batching keeps what memory is free, and an attention of its own.
            loaded.destroy_cached_continuous_batching_manager()
            loaded.set_attn_implementation("sdpa")


def of_one_length(tasks: Sequence[Task], max_new_tokens: int) -> list[Task]:
    """The prompts cut to the shortest one's length, each continued by as many tokens."""
    shortest = min(len(task.prompt_token_ids) for task in tasks)
    return [
        Task(prompt_token_ids=task.prompt_token_ids[:shortest], max_new_tokens=max_new_tokens)
        for task in tasks
    ]


def _runs(
    model: PreTrainedModel, tasks: Sequence[Task], streams: int, max_batch_tokens: int
) -> dict[str, Callable[[], int]]:
    """Each peer; returns the number of output tokens.

    A fixed cache makes transformers compile the decode step, on a GPU only.
    """

    def batching() -> int:
        # Older versions have no such class. Without a limit it takes nearly all memory.
        config = transformers.ContinuousBatchingConfig(
            max_memory_percent=_MEMORY_SHARES[model.device.type],
            max_batch_tokens=max_batch_tokens,
        )
        return generate_batch(
            model,
            tasks,
            continuous_batching_config=config,
            # Its cache and its graphs are kept from one turn to the next.
            persistent_manager=True,
        )

    def compiled() -> int:
        return generate(model, tasks, streams, cache_implementation="static")

    return {BATCHING: batching, COMPILED: compiled}


async def _against(
    bench: Bench,
    own: Variant,
    name: str,
    run: Callable[[], int],
    tasks: Sequence[Task],
    num_left: int,
) -> Measure:
    what = f"{bench.size.small.name}: Tandem without drafts / transformers' {name}"

    def tokens_per_s() -> float:
        started_at_s = time.perf_counter()
        num_tokens = run()
        if num_tokens < sum(task.max_new_tokens for task in tasks) // 2:
            raise RuntimeError(f"{name} gave {num_tokens} tokens and no error; see standard error")
        return num_tokens / (time.perf_counter() - started_at_s)

    peer = variant(name, own.streams, tokens_per_s)
    try:
        await bench.compare(own, peer, num_left=num_left)
    except torch.AcceleratorError:
        raise  # nothing runs on the device after it
    except Exception as error:
        # Another project's code: it may fail in any way, and says why.
        note = f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return bench.measure("transformers", what, own.streams, None, note=note)
    return bench.ratio("transformers", what, own, peer, Goal(value=GOALS[name]))
