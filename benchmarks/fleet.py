"""How many cells, gateways, verifiers and drafters so many streams need, and what each then does.

    python -m benchmarks.fleet [--streams 10000 100000 1000000] [--step-ms 12] ...

Prints a table in Markdown. It is arithmetic from what one of each carries: give your own figures,
from `tandem bench` and the metrics of one verifier under load. The defaults are examples. A cell is
an installation of its own: its gateways, verifiers and drafters know no other, so what one of them
does is the same in a fleet of any size.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one of each carries.

    Attributes:
        sequences: that a verifier runs at a time.
        step_ms: of a verifier with so many.
        gateway_streams: that a gateway holds.
        gateway_messages: that a gateway's core handles, per second.
        drafter_proposals: that a drafter makes, per second.
        cell_verifiers: the most in a cell.
    """

    sequences: int = 48
    step_ms: float = 12.0
    gateway_streams: int = 256
    gateway_messages: float = 11_300.0
    drafter_proposals: float = 146_000.0
    cell_verifiers: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A fleet; figures of a gateway, a drafter and a verifier are those in a full cell.

    Attributes:
        message_ms: between a stream's messages: a step, or more where its gateway's core gathers.
        drafter_load: the share of a core that proposals take.
    """

    streams: int
    cells: int
    gateways: int
    verifiers: int
    drafters: int
    cell_sessions: int
    message_ms: float
    drafter_load: float


def plan(streams: int, load: Load) -> Plan:
    """The smallest fleet for so many streams in which each cell may lose one of each."""
    verifiers = math.ceil(streams / load.sequences)
    # One verifier of each cell is spare.
    cells = math.ceil(verifiers / (load.cell_verifiers - 1))
    cell_verifiers = math.ceil(verifiers / cells) + 1
    cell_streams = math.ceil(streams / cells)
    cell_gateways = math.ceil(cell_streams / load.gateway_streams) + 1
    steps_per_s = 1000 / load.step_ms
    proposals_per_s = cell_streams * steps_per_s
    # No more drafters than carry the cell, and one: each verifier talks to one of them.
    cell_drafters = math.ceil(proposals_per_s / load.drafter_proposals) + 1
    gateway_streams = cell_streams / (cell_gateways - 1)
    return Plan(
        streams=streams,
        cells=cells,
        gateways=cells * cell_gateways,
        verifiers=cells * cell_verifiers,
        drafters=cells * cell_drafters,
        cell_sessions=cell_gateways * cell_verifiers,
        message_ms=max(load.step_ms, 1000 * gateway_streams / load.gateway_messages),
        drafter_load=proposals_per_s / (cell_drafters - 1) / load.drafter_proposals,
    )


def table(plans: Sequence[Plan]) -> str:
    """In Markdown, a row for each."""
    head = (
        "| Streams | Cells | Gateways | Verifiers | Drafters | Sessions in a cell "
        "| ms between messages | A drafter's core |"
    )
    rows = [
        f"| {each.streams:,} | {each.cells:,} | {each.gateways:,} | {each.verifiers:,} "
        f"| {each.drafters:,} | {each.cell_sessions} | {each.message_ms:.0f} "
        f"| {each.drafter_load:.0%} |"
        for each in plans
    ]
    return "\n".join([head, "|" + "--:|" * 8, *rows])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    for each in fields(Load):
        flag = "--" + each.name.replace("_", "-")
        parser.add_argument(flag, type=type(each.default), default=each.default)
    arguments = vars(parser.parse_args(argv))
    streams = arguments.pop("streams")
    print(table([plan(each, Load(**arguments)) for each in streams]))


if __name__ == "__main__":
    main()
