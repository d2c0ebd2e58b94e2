"""The drafter's speed, memory and policies in one run, as a table and JSON.

    python -m benchmarks.drafter [--quick] [--json FILE]

Compare figures of one run only: other work on the machine slows everything down. For kernels, the
best round stands beside the median, since a round is a fraction of a millisecond.
"""

import argparse
import asyncio
import concurrent.futures
import itertools
import json
import multiprocessing
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ParamSpec, TypeVar

from tokenizers import Tokenizer

from benchmarks.drafter_kernels import (
    BATCH,
    LENGTHS,
    POLICIES,
    MemoryCheck,
    ProposalCost,
    TextCost,
    measure_proposals,
    measure_texts,
)
from benchmarks.drafter_policies import (
    PolicyFigure,
    measure_policy,
    measure_pooled_policy,
    policies,
)
from benchmarks.drafter_wire import (
    BatchCost,
    RoundTrip,
    Throughput,
    measure_batch_cost,
    measure_round_trips,
    measure_throughput,
)
from benchmarks.held_out_texts import Continuation, held_out_texts
from benchmarks.machine import processor
from benchmarks.services import running_service
from benchmarks.workloads import BUNDLED_MODEL
from drafter.ngram.params import Algorithm

P = ParamSpec("P")
R = TypeVar("R")

BATCHES = (1, 64, 256)
PAUSES_S = (0.005, 0.0)
"""Pauses between requests: a verifier's step, and none."""


def main() -> None:
    """Measures everything, and prints each result when it is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and texts")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    start_s = time.perf_counter()
    print(f"{processor()}, Python {platform.python_version()}\n")

    costs = measure_all_kernels(num_rounds=3 if arguments.quick else 11)
    trips, throughputs, batch_costs = asyncio.run(_measure_wire(quick=arguments.quick))
    figures, notes = measure_all_policies()
    print(f"\n{time.perf_counter() - start_s:.0f} s in all")
    if arguments.json is not None:
        rows = [*costs, *trips, *throughputs, *batch_costs, *figures]
        by_kind: dict[str, list[dict[str, object]]] = {}
        for row in rows:
            by_kind.setdefault(type(row).__name__, []).append(asdict(row))
        arguments.json.write_text(json.dumps({**by_kind, "notes": notes}, indent=1) + "\n")


def measure_all_kernels(*, num_rounds: int) -> list[ProposalCost | TextCost | MemoryCheck]:
    """Measures each policy and length in its own process, to separate their memory."""
    print(
        f"Proposals: {BATCH} distinct histories in shuffled order, a token appended to each, cold"
        " caches, one thread, n 2..5, k 8; ns each, best / median\n"
    )
    print(f"{'':18}{'tokens':>8}{'':>6}{'proposal':>16}{'index, later':>16}")
    costs: list[ProposalCost | TextCost | MemoryCheck] = []
    for policy in POLICIES:
        for num_tokens in LENGTHS:
            for row in _in_new_process(
                measure_proposals, policy, num_tokens, num_rounds=num_rounds
            ):
                if isinstance(row, ProposalCost):
                    print(
                        f"{policy:18}{num_tokens:8}{'hit' if row.hits else 'miss':>6}"
                        f"{row.best_proposal_ns:9.0f} /{row.proposal_ns:5.0f}"
                        f"{row.best_index_ns:9.0f} /{row.index_ns:5.0f}"
                    )
                costs.append(row)
    _print_ratios([row for row in costs if isinstance(row, ProposalCost)])
    checks = [
        # With less, growth of the process itself would dominate.
        row.reported_to_resident
        for row in costs
        if isinstance(row, MemoryCheck) and row.num_tokens >= 8000
    ]
    print(f"bytes reported / resident: {min(checks):.2f} to {max(checks):.2f}")
    print("\nTexts: ns per token, appended in deltas of 8,192 and indexed; bytes per token\n")
    for policy, params in POLICIES.items():
        if params.algorithm is Algorithm.KMP:
            continue
        for text_row in _in_new_process(measure_texts, policy):
            print(
                f"{policy:18}{text_row.kind:10}{text_row.num_tokens:8}"
                f"{text_row.append_ns_per_token:8.0f} ns{text_row.bytes_per_token:7.1f}"
                f" (at most {text_row.worst_bytes_per_token:.1f} on the way)"
            )
            costs.append(text_row)
    return costs


def _in_new_process(measure: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, *arguments, **keywords).result()


def measure_all_policies() -> tuple[list[PolicyFigure], list[str]]:
    """One row per policy."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    texts, notes = held_out_texts(tokenizer)
    print("\nHeld-out text as the model's output: tokens per step / drafted per accepted token\n")
    _print_kinds(texts)
    figures = []
    for policy in policies():
        for measure in (measure_policy, measure_pooled_policy):
            row = [measure(policy, kind, found) for kind, found in texts.items()]
            _print_figures(row)
            figures += row
    for note in notes:
        print(f"not measured: {note}")
    return figures, notes


def _print_kinds(texts: Mapping[str, Sequence[Continuation]]) -> None:
    """The head of a table: how many texts of each kind."""
    print(f"{'':38}" + "".join(f"{f'{len(t)} {kind}':>18}" for kind, t in texts.items()))


def _print_figures(row: Sequence[PolicyFigure]) -> None:
    """One policy's, by kind of text."""
    cells = [f"{each.tokens_per_step:.2f} / {each.drafted_per_accepted:.2f}" for each in row]
    print(f"{row[0].policy:38}" + "".join(f"{cell:>18}" for cell in cells))


async def _measure_wire(
    *, quick: bool
) -> tuple[list[RoundTrip], list[Throughput], list[BatchCost]]:
    num_rounds, num_steps = (3, 30) if quick else (12, 50)
    print(
        "\nProposeStream against a bare echo of the same bytes, 8 tokens per sequence; ms,"
        " p50 / p99\n"
    )
    trips, throughputs, costs = [], [], []
    with running_service("drafter") as drafter, running_service("benchmarks.echo_server") as echo:
        for pause_s, num_sequences in itertools.product(PAUSES_S, BATCHES):
            trip = await measure_round_trips(
                drafter,
                echo,
                num_sequences,
                pause_s=pause_s,
                num_rounds=num_rounds,
                num_steps=num_steps,
            )
            print(
                f"{num_sequences:4} sequences, {trip.pause_ms:.0f} ms apart"
                f"  {trip.drafter_p50_ms:.2f} /{trip.drafter_p99_ms:5.2f}"
                f"   echo {trip.echo_p50_ms:.2f} /{trip.echo_p99_ms:5.2f}"
                f"   {trip.drafter_p50_ms / trip.echo_p50_ms:.1f} x"
            )
            trips.append(trip)
        for num_sequences in (16, 64):
            throughput = await measure_throughput(
                drafter, num_streams=4, num_sequences=num_sequences, num_steps=4 * num_steps
            )
            print(
                f"4 streams x {num_sequences} sequences: "
                f"{throughput.proposals_per_s:,.0f} proposals/s"
            )
            throughputs.append(throughput)
    print("\nTime of a live batch in the server, us\n")
    for num_sequences in BATCHES:
        cost = await measure_batch_cost(num_sequences, num_steps=2 * num_steps)
        print(
            f"{num_sequences:4} sequences  answer, best / median, {cost.best_answer_us:.0f} /"
            f" {cost.answer_us:.0f}; index, after that, {cost.index_us:.0f} on average"
        )
        costs.append(cost)
    return trips, throughputs, costs


def _print_ratios(costs: Sequence[ProposalCost]) -> None:
    def of(policy: str, num_tokens: int) -> ProposalCost:
        return next(
            c for c in costs if (c.policy, c.num_tokens, c.hits) == (policy, num_tokens, False)
        )

    index, short, kmp = (
        of("index, longest", LENGTHS[-1]),
        of("index, longest", LENGTHS[0]),
        of("KMP, earliest", LENGTHS[-1]),
    )
    print(
        f"\nmiss, {LENGTHS[-1]:,} tokens: {index.proposal_ns / short.proposal_ns:.2f} x the index's"
        f" {LENGTHS[0]:,}, KMP {kmp.proposal_ns / index.proposal_ns:,.0f} x the index"
    )


if __name__ == "__main__":
    main()
