"""`make demo`: a rename by a real model, with and without speculation.

Starts drafter, verifier and gateway with the bundled model, renames an identifier in a snippet that
the model has never seen, and shows which tokens were drafted and accepted and how much time that
saved. The output is the same either way. Accepted tokens are coloured; without a terminal, or with
NO_COLOR set, they stand between « and ».
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.demo_model.dataset import MODEL_FOLDER, read_heldout
from tandem.client import (
    Chunk,
    Finished,
    GenerationRequest,
    SpeculationParams,
    TandemClient,
    TandemError,
    Usage,
)
from tandem.local import LocalTandemError, local_tandem

# A task that the model solves exactly, as it does a third of them.
EXACT_TASK = 53
# Each way is timed this often, alternately, since other work on the machine disturbs single runs.
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What is printed around accepted tokens."""

    before: str
    after: str
    name: str


COLOURED = Marks(before="\x1b[32m", after="\x1b[0m", name="\x1b[32mgreen\x1b[0m")
PLAIN = Marks(before="«", after="»", name="between « and »")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One timed request."""

    chunks: tuple[Chunk, ...]
    usage: Usage
    duration_s: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for chunk in self.chunks for token_id in chunk.token_ids)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.duration_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--task",
        type=int,
        default=EXACT_TASK,
        metavar="N",
        help="which held-out task, from 0 (default: %(default)s)",
    )
    arguments = parser.parse_args()
    tasks = read_heldout()
    if not 0 <= arguments.task < len(tasks):
        parser.error(f"--task: there are {len(tasks)}, counted from 0")
    task = tasks[arguments.task]
    marks = COLOURED if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else PLAIN
    print("starting drafter, verifier and gateway with the bundled model ...", flush=True)
    try:
        with (
            local_tandem(model=MODEL_FOLDER, quiet=True) as addresses,
            TandemClient(addresses["grpc"]) as client,
        ):
            print(
                f"in {task['source_file']}, renaming {task['old']} to {task['new']}\n", flush=True
            )
            timed(client, task["prompt"], speculation=True)  # the first request warms up
            plain, fast = [], []
            for _ in range(ROUNDS):
                plain.append(timed(client, task["prompt"], speculation=False))
                fast.append(timed(client, task["prompt"], speculation=True))
            show(fast[0], marks)
            exact = fast[0].text == task["reference"]
            print(f"the edit is {'exactly' if exact else 'not exactly'} the expected one\n")
            compare(plain, fast)
    except (LocalTandemError, TandemError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\neverything is stopped")
    return 0


def show(run: Run, marks: Marks) -> None:
    """Prints the output with the accepted tokens marked."""
    print(f"the edited snippet; tokens that were drafted and accepted are {marks.name}:\n")
    for chunk in run.chunks:
        for accepted, tokens in itertools.groupby(
            chunk.reported_tokens, lambda each: each.accepted
        ):
            text = "".join(token.text for token in tokens)
            print(marked(text, marks) if accepted else text, end="")
    print("\n")


def marked(text: str, marks: Marks) -> str:
    return f"{marks.before}{text}{marks.after}" if text else ""


def compare(plain: Sequence[Run], fast: Sequence[Run]) -> None:
    same = len({run.token_ids for run in [*plain, *fast]}) == 1
    plain_speed = statistics.median(run.tokens_per_s for run in plain)
    fast_speed = statistics.median(run.tokens_per_s for run in fast)
    usage = fast[-1].usage
    print(f"{'':<24}{'model steps':>12}{'tokens/s':>12}")
    print(f"{'without speculation':<24}{plain[-1].usage.num_steps:>12}{plain_speed:>12.0f}")
    print(f"{'with speculation':<24}{usage.num_steps:>12}{fast_speed:>12.0f}")
    print(f"\n{fast_speed / plain_speed:.1f} times as fast", end="")
    print(f" (median of {ROUNDS} runs each), {'the same' if same else 'NOT THE SAME'} tokens")
    if usage.mean_acceptance_length is not None:
        print(
            f"{usage.num_accepted_tokens} of {usage.num_draft_tokens} drafted tokens accepted, "
            f"{usage.mean_acceptance_length:.2f} tokens per step with drafts"
        )


def timed(client: TandemClient, prompt: str, *, speculation: bool) -> Run:
    chunks: list[Chunk] = []
    usage = Usage()
    started = time.perf_counter()
    request = GenerationRequest(
        prompt=prompt,
        speculation=SpeculationParams(enabled=None if speculation else False),
        report_tokens=True,
    )
    for event in client.stream(request):
        if isinstance(event, Chunk):
            chunks.append(event)
        elif isinstance(event, Finished):
            usage = event.usage
    return Run(chunks=tuple(chunks), usage=usage, duration_s=time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
