"""The drafter's speed, memory and policies, in one run: a table, and JSON.

    python -m benchmarks.drafter [--quick] [--json FILE]

Compare figures of one run only: other work on the machine slows everything down. Of the kernels the
best round counts beside the median, since a round is a fraction of a millisecond.
"""

import argparse
import asyncio
import concurrent.futures
import itertools
import json
import multiprocessing
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.drafter_kernels import (
    BATCH,
    LENGTHS,
    POLICIES,
    ProposalCost,
    TextCost,
    measure_kernels,
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
from benchmarks.held_out_texts import held_out_texts
from benchmarks.services import running_service
from benchmarks.workloads import BUNDLED_MODEL

BATCHES = (1, 64, 256)
PAUSES_S = (0.005, 0.0)
"""A verifier's step lies between two requests; and without any pause."""


def main() -> None:
    """Measures everything, and prints it as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and texts")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    start_s = time.perf_counter()
    print(
        f"{platform.machine()}, {platform.processor() or 'unknown'}, "
        f"{multiprocessing.cpu_count()} cores, Python {platform.python_version()}\n"
    )

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


def measure_all_kernels(*, num_rounds: int) -> list[ProposalCost | TextCost]:
    """Each policy and length in a process of its own, whose memory is its own."""
    print(
        f"Proposals: {BATCH} distinct histories in shuffled order, cold caches, one thread, n 2..5,"
        " k 8; ns each, best / median\n"
    )
    print(f"{'':18}{'tokens':>8}{'':>6}{'proposal':>16}{'with append':>16}")
    costs: list[ProposalCost | TextCost] = []
    context = multiprocessing.get_context("spawn")
    for policy in POLICIES:
        for num_tokens in LENGTHS:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                found = pool.submit(measure_kernels, policy, num_tokens, num_rounds=num_rounds)
                rows = found.result()
            for row in rows:
                if isinstance(row, ProposalCost):
                    print(
                        f"{policy:18}{num_tokens:8}{'hit' if row.hits else 'miss':>6}"
                        f"{row.best_proposal_ns:9.0f} /{row.proposal_ns:5.0f}"
                        f"{row.best_append_and_proposal_ns:9.0f} /{row.append_and_proposal_ns:5.0f}"
                    )
            costs += rows
    _print_ratios([row for row in costs if isinstance(row, ProposalCost)])
    print(
        "\nTexts, no n-gram twice: ns per appended token (deltas of 8,192), bytes per token,"
        " reported / resident bytes\n"
    )
    for row in costs:
        if isinstance(row, TextCost):
            print(
                f"{row.policy:18}{row.num_tokens:8}{row.append_ns_per_token:8.0f} ns"
                f"{row.bytes_per_token:7.1f} (at most {row.worst_bytes_per_token:.1f} on the way)"
                f"{row.reported_to_resident:7.2f}"
            )
    return costs


def measure_all_policies() -> tuple[list[PolicyFigure], list[str]]:
    """Every policy a row."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    texts, notes = held_out_texts(tokenizer)
    print("\nHeld-out text as the model's output: tokens per step / drafted per accepted token\n")
    print(f"{'':38}" + "".join(f"{f'{len(t)} {kind}':>18}" for kind, t in texts.items()))
    figures = []
    for policy in policies():
        for measure in (measure_policy, measure_pooled_policy):
            row = [measure(policy, kind, found) for kind, found in texts.items()]
            print(
                f"{row[0].policy:38}"
                + "".join(
                    f"{f'{r.tokens_per_step:.2f} / {r.drafted_per_accepted:.2f}':>18}" for r in row
                )
            )
            figures += row
    for note in notes:
        print(f"not measured: {note}")
    return figures, notes


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
    print("\nWhat a live batch takes in the server, us\n")
    for num_sequences in BATCHES:
        cost = await measure_batch_cost(num_sequences, num_steps=2 * num_steps)
        print(
            f"{num_sequences:4} sequences  answer {cost.answer_us:.0f}; "
            f"index, after that, {cost.index_us:.0f}"
        )
        costs.append(cost)
    return trips, throughputs, costs


def _print_ratios(costs: Sequence[ProposalCost]) -> None:
    def of(policy: str, num_tokens: int) -> ProposalCost:
        return next(
            c for c in costs if (c.policy, c.num_tokens, c.hits) == (policy, num_tokens, False)
        )

    index, short, kmp = (
        of("index, earliest", LENGTHS[-1]),
        of("index, earliest", LENGTHS[0]),
        of("KMP, earliest", LENGTHS[-1]),
    )
    print(
        f"\nmiss, {LENGTHS[-1]:,} tokens: {index.proposal_ns / short.proposal_ns:.2f} x the index's"
        f" {LENGTHS[0]:,}, KMP {kmp.proposal_ns / index.proposal_ns:,.0f} x the index"
    )


if __name__ == "__main__":
    main()
