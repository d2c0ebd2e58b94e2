"""The learned number of drafts against fixed ones, and against none.

    python -m benchmarks.speculation [--dtypes float32 bfloat16] [--streams 1 4 16 64]
                                     [--texts renames source documents random] [--json FILE]

The engine in one process, with drafts from the drafter's own kernel: verifying as many as the
verifier chooses, and at most 0, 1, 3, 7, 15 and 31 per sequence and step, all by turns. The model
says of renames what it says; of source code and documents the text itself, at the cost of its
forward pass; and random text never repeats. The drafting itself, which is another process's work in
the system, is left out of a run's time.

A ratio is the median over the rounds of the learned number's tokens per second over a fixed one's
in the same round, with the 95 % bootstrap interval of that median. For each round, the fixed number
that is the best is chosen by the other half of the rounds: chosen by all, the luckiest of equal
numbers would win, and the ratio would be too low. All numbers run in the first round; then those go
on that can still be the best, and 0. A cell ends when its intervals lie on one side of the goals,
or after --seconds.

Each of the 32 cells is kept in the file of --json when it is measured, and a run that finds some of
its cells there measures the others only. A figure that misses its goal is bold, and named after the
table, with whether the interval holds the goal.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.forced_texts import ForcedTexts
from benchmarks.held_out_texts import Continuation, held_out_texts
from benchmarks.in_process import Counts, InProcessEngine
from benchmarks.machine import processor
from benchmarks.ratios import Interval, median_interval, ratios
from benchmarks.whole_file import write_whole
from benchmarks.workloads import BUNDLED_MODEL, Task, random_tasks, rename_tasks
from servicekit.logs import configure_logs
from verifier.batch.host_step import ComputesLogits
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig

FIXED = (0, 1, 3, 7, 15, 31)
TEXTS = ("renames", "source", "documents", "random")
PROMPT_TOKENS, OUTPUT_TOKENS = 500, 200
LEARNED = "learned"
GOALS = {"of_best": 0.97, "on_off": 0.98}
# How many fixed numbers can be the best after the first round.
NUM_CONTENDERS = 3

# `LEARNED`, or the most drafts per sequence and step.
Variant = str | int
# Dtype, text, streams.
_Cell = tuple[str, str, int]


@dataclass(slots=True)
class _Turns:
    """Figures by variant.

    Attributes:
        tokens_per_s: of each round.
        counts: of the last round.
        contenders: the fixed numbers that can be the best.
    """

    num_rounds: int = 0
    tokens_per_s: dict[Variant, list[float]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[Variant, Counts] = field(default_factory=dict)
    contenders: list[int] = field(default_factory=list)

    def best_of(self, rounds: Sequence[int]) -> int:
        """The fixed number that was the fastest in these rounds."""
        medians = {
            k: statistics.median(self.tokens_per_s[k][i] for i in rounds) for k in self.contenders
        }
        return max(medians, key=medians.__getitem__)

    def figures(self) -> dict[str, Interval | None]:
        """What has a goal, by its name; None: 0 was not measured."""
        learned, rounds = self.tokens_per_s[LEARNED], range(self.num_rounds)
        # By the parity of a round: the best of the others.
        best = [self.best_of([i for i in rounds if i % 2 != parity] or rounds) for parity in (0, 1)]
        of_best = [learned[i] / self.tokens_per_s[best[i % 2]][i] for i in rounds]
        on_off = ratios(learned, self.tokens_per_s[0]) if 0 in self.tokens_per_s else None
        return {
            "of_best": median_interval(of_best),
            "on_off": median_interval(on_off) if on_off else None,
        }

    @property
    def is_decided(self) -> bool:
        """Whether every figure's interval lies on one side of its goal."""
        return all(
            each is None or each.low >= GOALS[name] or each.high < GOALS[name]
            for name, each in self.figures().items()
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--fixed", nargs="+", type=int, default=list(FIXED))
    parser.add_argument("--threads", type=int, default=1, help="of the model")
    parser.add_argument("--rounds", type=int, default=6, help="at least so many")
    parser.add_argument("--seconds", type=float, default=45.0, help="of rounds, at most, by cell")
    parser.add_argument("--json", type=Path, help="also keep the figures here, and go on with them")
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {
        "command": "python -m benchmarks.speculation",
        **{name: getattr(arguments, name) for name in ("threads", "fixed", "rounds", "seconds")},
        "model": str(arguments.model.resolve()),
        "processor": processor(),
    }
    try:
        rows = _kept_rows(arguments.json, result)
    except ValueError as error:
        parser.error(str(error))
    cells = list(itertools.product(arguments.dtypes, arguments.texts, arguments.streams))
    missing = [cell for cell in cells if cell not in rows]
    for dtype in dict.fromkeys(dtype for dtype, _, _ in missing):
        config = VerifierConfig.model_validate(
            {
                "model": arguments.model.resolve(),
                "device": "cpu",
                "dtype": dtype,
                "threads": arguments.threads,
                "numerics": "strict",
                "prefix_cache": False,
            }
        )
        loaded = load_model(config)
        for cell in missing:
            if cell[0] != dtype:
                continue
            _, text, streams = cell
            row = _measure(config, loaded, text, streams, arguments)
            rows[cell] = {"dtype": dtype, "text": text, "streams": streams, **row}
            print(_line(rows[cell]), file=sys.stderr, flush=True)
            if arguments.json:
                kept = json.dumps({**result, "rows": list(rows.values())}, indent=1) + "\n"
                write_whole(arguments.json, kept.encode())
    measured = [rows[cell] for cell in cells]
    print(f"{arguments.threads} model threads, {processor()}\n")
    print(
        "| dtype | text | streams | rounds | learned, tokens/s | best fixed | of it | 95 % "
        "| on / off | 95 % |\n|" + "---|" * 10
    )
    for row in measured:
        print(_line(row))
    print("\n" + "\n".join(_misses(measured) or ["Every cell meets its goals."]))


def _kept_rows(path: Path | None, about: dict[str, Any]) -> dict[_Cell, dict[str, Any]]:
    """What an earlier run has measured.

    Raises:
        ValueError: it was a run with other settings, or on another machine.
    """
    if path is None or not path.exists():
        return {}
    kept = json.loads(path.read_text())
    for name, value in about.items():
        if kept.get(name) != value:
            raise ValueError(f"{path} has {name} {kept.get(name)!r}, this run {value!r}")
    return {(row["dtype"], row["text"], row["streams"]): row for row in kept["rows"]}


def _misses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each figure by the clock that misses its goal."""
    return [
        f"Misses its goal: {row['dtype']}, {row['text']}, {row['streams']}: "
        f"{name} {row[name]['median']:.3f} < {goal}"
        + ("" if row[name]["high"] < goal else ", which the interval holds")
        for row in rows
        for name, goal in GOALS.items()
        if row[name] is not None and row[name]["median"] < goal
    ]


def _measure(
    config: VerifierConfig,
    loaded: LoadedModel,
    text: str,
    streams: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    tasks, loaded = _tasks(config.model, loaded, text, streams)
    with contextlib.ExitStack() as stack:
        learning, fixed = (
            stack.enter_context(
                InProcessEngine(
                    config.model_copy(update={"speculation_depth": depth}), loaded
                ).started()
            )
            for depth in ("learned", "limits")
        )

        def run(variant: Variant) -> Counts:
            if isinstance(variant, str):
                return learning.run(tasks, streams=streams, speculate=True)
            return fixed.run(tasks, streams=streams, speculate=variant > 0, max_drafts=variant)

        # What the kernels need, and what the policy learns first.
        learning.run(tasks[: 2 * streams], streams=streams, speculate=True)
        turns = _take_turns(run, arguments)
    return {
        "rounds": turns.num_rounds,
        "depths": {
            str(variant): counts.num_draft_tokens / counts.num_steps / streams
            for variant, counts in turns.counts.items()
        },
        "best": turns.best_of(range(turns.num_rounds)),
        "tokens_per_s": {str(variant): each for variant, each in turns.tokens_per_s.items()},
        **{name: each and asdict(each) for name, each in turns.figures().items()},
    }


def _take_turns(run: Callable[[Variant], Counts], arguments: argparse.Namespace) -> _Turns:
    """Runs all variants in rounds; after the first, the fixed ones that can still be the best."""
    turns = _Turns()
    variants: list[Variant] = [LEARNED, *arguments.fixed]
    began_at_s = time.perf_counter()
    while turns.num_rounds < arguments.rounds or (
        time.perf_counter() - began_at_s < arguments.seconds and not turns.is_decided
    ):
        # Which comes after which must not matter.
        first = turns.num_rounds % len(variants)
        for variant in variants[first:] + variants[:first]:
            started_at_s = time.perf_counter()
            counts = turns.counts[variant] = run(variant)
            duration_s = time.perf_counter() - started_at_s - counts.draft_s
            turns.tokens_per_s[variant].append(counts.num_tokens / duration_s)
        if turns.num_rounds == 0:
            fastest = sorted(arguments.fixed, key=lambda k: -turns.tokens_per_s[k][0])
            turns.contenders = fastest[:NUM_CONTENDERS]
            kept = {LEARNED, 0, *turns.contenders}
            variants = [variant for variant in variants if variant in kept]
        turns.num_rounds += 1
    return turns


def _tasks(
    model: Path, loaded: LoadedModel, text: str, streams: int
) -> tuple[Sequence[Task], LoadedModel]:
    """Tasks for the streams, and the model that answers them."""
    # So some streams go on with a second task.
    count = max(8, streams + min(8, streams // 2))
    if text == "renames":
        return rename_tasks(model, count), loaded
    if text == "random":
        return random_tasks(loaded.served.vocab_size, count), loaded
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = held_out_texts(tokenizer)[0][text]
    pieces = _pieces(texts, count)
    assert isinstance(loaded.model, ComputesLogits), "logits do not come to the host"
    model_ = ForcedTexts(loaded.model, pieces)
    return [task for task, _ in pieces], replace(loaded, model=model_)


def _pieces(texts: Sequence[Continuation], count: int) -> list[tuple[Task, Sequence[int]]]:
    """The first pieces of all texts, then the second ones, and so on."""
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    pieces: list[tuple[Task, Sequence[int]]] = []
    wholes = [[*text.known_token_ids, *text.coming_token_ids] for text in texts]
    for start in range(0, len(wholes[0]) - length, OUTPUT_TOKENS):
        for whole in wholes:
            prompt = whole[start : start + PROMPT_TOKENS]
            coming = whole[start + PROMPT_TOKENS : start + length]
            task = Task(prompt_token_ids=prompt, max_new_tokens=len(coming))
            pieces.append((task, coming))
    assert len(pieces) >= count
    return pieces[:count]


def _line(row: dict[str, Any]) -> str:
    speeds = row["tokens_per_s"]
    cells = [
        row["dtype"],
        row["text"],
        row["streams"],
        row["rounds"],
        f"{statistics.median(speeds[LEARNED]):.0f} (K {row['depths'][LEARNED]:.1f})",
        f"{statistics.median(speeds[str(row['best'])]):.0f} (K {row['best']})",
    ]
    for name, goal in GOALS.items():
        if row[name] is None:
            cells += ["-", "-"]
        else:
            median, low, high = (row[name][each] for each in ("median", "low", "high"))
            cells.append(f"{median:.2f}" if median >= goal else f"**{median:.2f}**")
            cells.append(f"{low:.2f} to {high:.2f}")
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    # stdout is the table's.
    configure_logs("warning", "benchmark")
    main()
