"""Policies of drafting, and of how many drafts to verify, judged by recorded answers.

    python -m benchmarks.real.replay [--peers FOLDER] [--kinds chat edit ...] [--json FILE]

What to draft: by kind of prompt, tokens per step / drafted per accepted. Every drafter is asked at
every token, and each step verifies all of a draft, `MOST_DRAFTS` at most. `--peers` adds other
systems' own code, fetched into a folder, and takes some minutes at first.

A small model that answers greedily ends up in loops, which larger ones rarely do: an answer ends
where it says the same for the third time, unless `--loops`.

How many to verify: by kind and number of streams, tokens per time of each rule over the best fixed
number's, with Tandem's drafts and the times of a pass by rows that `--ms` gives. Answers are
computed as many at a time as there are streams; prompts take no time.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.arguments import command_parser, write_figures
from benchmarks.real.depths import FIXED, Hinted, rules, run_streams
from benchmarks.real.drafters import MOST_DRAFTS, OWN, Drafter, TandemDrafter, peers
from benchmarks.real.recordings import FOLDER, Recording, read_recordings
from benchmarks.real.tasks import ANSWER_TOKENS
from benchmarks.report import table

STREAMS = (1, 4, 16)
_LOOP_TOKENS = 24
# Of SmolLM2-135M, Q4_1, one thread of an AMD EPYC with AVX512_VNNI.
_MS = "1:3.5,2:3.5,3:3.8,4:4.2,6:5.7,8:7.1,9:8.5,16:13.9,17:15.5,24:20.7,25:22.2,32:27.4,64:54.2"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    recordings = {
        kind: read_recordings(arguments.folder / f"{kind}.npz.xz")[: 3 if arguments.quick else None]
        for kind in arguments.kinds
    }
    if not arguments.loops:
        recordings = {
            kind: [without_loop(each) for each in found] for kind, found in recordings.items()
        }
    drafters = OWN | (peers(arguments.peers) if arguments.peers else {})
    drafting = [
        {"drafter": name}
        | {kind: str(_count(hints_of(make(), found, kind))) for kind, found in recordings.items()}
        for name, make in drafters.items()
    ]
    print(table(drafting), flush=True)
    depths = _depths(recordings, arguments)
    print(f"\n{table(depths)}")
    write_figures("real.replay", arguments, {"drafting": drafting, "depths": depths})


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("real.replay", __doc__)
    parser.add_argument("--peers", type=Path, help="folder of other systems' code")
    parser.add_argument("--kinds", nargs="+", default=list(ANSWER_TOKENS), choices=ANSWER_TOKENS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the recordings")
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS), choices=STREAMS)
    parser.add_argument("--loops", action="store_true", help="answers in full")
    parser.add_argument("--ms", type=_points, default=_MS, help="ROWS:MS, separated by commas")
    return parser.parse_args(argv)


def _points(text: str) -> list[tuple[float, ...]]:
    """Rows and milliseconds, rows ascending."""
    try:
        points = sorted(tuple(map(float, point.split(":"))) for point in text.split(","))
        rows, ms = np.array(points).T
        if len(ms) < 2 or not (np.diff(rows) > 0).all():
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWS:MS, two points at least") from None
    return points


def _curve(points: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """Milliseconds by rows from 0 on: between points and beyond the last straight."""
    rows, ms = np.array(points).T
    every = np.arange(1 + max(STREAMS) * (1 + MOST_DRAFTS))
    slope = (ms[-1] - ms[-2]) / (rows[-1] - rows[-2])
    return np.asarray(np.interp(every, rows, ms) + slope * np.maximum(0, every - rows[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Of all steps after the first token."""

    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int

    def __str__(self) -> str:
        drafted = f"{self.num_drafted / self.num_accepted:.2f}" if self.num_accepted else "-"
        return f"{self.num_tokens / self.num_steps:.2f} / {drafted}"


def without_loop(recording: Recording) -> Recording:
    """The answer up to where its end has come three times in a row, in `_LOOP_TOKENS` or more."""
    output = recording.output_token_ids
    end = len(output)
    for period in range(1, len(output) // 3 + 1):
        agrees = output[period:] == output[:-period]
        num_repeated = max(2 * period, _LOOP_TOKENS - period)
        in_a_row = np.convolve(agrees, np.ones(num_repeated, dtype=np.int64), "valid")
        found = np.flatnonzero(in_a_row == num_repeated)
        if len(agrees) >= num_repeated and len(found):
            end = min(end, int(found[0]) + num_repeated + period)
    return dataclasses.replace(recording, output_token_ids=output[:end])


def hints_of(drafter: Drafter, recordings: Sequence[Recording], kind: str) -> list[Hinted]:
    """What a drafter says before each token of each answer but the first, which a prompt gives."""
    stop_token_ids = {
        int(each.output_token_ids[-1])
        for each in recordings
        if len(each.output_token_ids) < ANSWER_TOKENS[kind]
    }
    return [_hinted(drafter, each, ANSWER_TOKENS[kind], stop_token_ids) for each in recordings]


def _hinted(
    drafter: Drafter, recording: Recording, max_new_tokens: int, stop_token_ids: set[int]
) -> Hinted:
    output: list[int] = recording.output_token_ids.tolist()
    hinted = Hinted(lengths=[0], agreed=[0], match_lengths=[0])
    drafter.begin(recording.prompt_token_ids)
    for i in range(1, len(output)):
        drafter.append(output[i - 1])
        draft, match_length = drafter.draft()
        # A draft needs room for itself and one more; a stop token comes without.
        draft = draft[: min(MOST_DRAFTS, max_new_tokens - i - 1)]
        draft = list(itertools.takewhile(lambda each: each not in stop_token_ids, draft))
        pairs = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(draft, output[i:], strict=False)
        )
        hinted.lengths.append(len(draft))
        hinted.agreed.append(sum(1 for _ in pairs))
        hinted.match_lengths.append(match_length)
    drafter.append(output[-1])
    drafter.end()
    return hinted


def _depths(
    recordings: Mapping[str, Sequence[Recording]], arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """By streams and rule, over the best fixed number of drafts."""
    rows: list[dict[str, object]] = []
    hinted = {kind: hints_of(TandemDrafter(), found, kind) for kind, found in recordings.items()}
    ms_by_rows = _curve(arguments.ms)
    every = rules()
    for streams in arguments.streams:
        speeds = {
            kind: {
                name: run_streams(make(), some, streams, ms_by_rows).tokens_per_ms
                for name, make in every.items()
            }
            for kind, some in hinted.items()
        }
        best = {
            kind: max((of_kind[f"K {most}"], most) for most in FIXED)
            for kind, of_kind in speeds.items()
        }
        row = {kind: f"K {most}, {speed * 1e3:.0f}" for kind, (speed, most) in best.items()}
        rows.append({"rule": "the best fixed one, tokens/s", "streams": streams} | row)
        for name in every:
            row = {kind: f"{speeds[kind][name] / best[kind][0]:.2f}" for kind in hinted}
            rows.append({"rule": name, "streams": streams} | row)
    return rows


def _count(hinted: Sequence[Hinted], most: int = MOST_DRAFTS) -> Count:
    """Of steps that verify all of a draft, up to so many."""
    num_tokens = num_steps = num_drafted = num_accepted = 0
    for each in hinted:
        at = 1
        while at < len(each.lengths):
            num_steps += 1
            depth = min(each.lengths[at], most)
            stood = min(each.agreed[at], depth)
            num_drafted += depth
            num_accepted += stood
            at += stood + 1
        num_tokens += max(0, len(each.lengths) - 1)
    return Count(
        num_tokens=num_tokens,
        num_steps=num_steps,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
    )


if __name__ == "__main__":
    main()
