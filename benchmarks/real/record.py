"""Records what the real model answers to the prompts of `tasks.py`.

    make real-model
    python -m benchmarks.real.record [--kinds chat edit ...] [--folder FOLDER] [--quick]

Greedy, in process, in batches, with the prefix cache: some 20 minutes. `replay.py` judges policies
by these answers.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.arguments import command_parser
from benchmarks.in_process import InProcessEngine
from benchmarks.real.recordings import FOLDER, NUM_TOP, Recording, write_recordings
from benchmarks.real.tasks import ANSWER_TOKENS, Conversation, PromptMaker, conversations
from benchmarks.turns import say
from benchmarks.workloads import REAL_MODEL, Task
from servicekit.logs import configure_logs
from verifier.config import VerifierConfig
from verifier.engine.messages import Decided

_STREAMS = 16
_KV_BLOCKS = 8192


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("real.record", __doc__)
    parser.add_argument("--model", type=Path, default=REAL_MODEL, help="GGUF file")
    parser.add_argument("--threads", type=int, default=1, help="of the model")
    parser.add_argument("--kinds", nargs="+", default=list(ANSWER_TOKENS), choices=ANSWER_TOKENS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the recordings")
    arguments = parser.parse_args(argv)
    maker = PromptMaker(arguments.model)
    config = VerifierConfig.model_validate(
        {
            "model": arguments.model.resolve(),
            "device": "cpu",
            "threads": arguments.threads,
            "num_kv_blocks": 512 if arguments.quick else _KV_BLOCKS,
        }
    )
    with InProcessEngine(config).started() as engine:
        for kind in arguments.kinds:
            _record_kind(engine, maker, kind, arguments)


def _record_kind(
    engine: InProcessEngine, maker: PromptMaker, kind: str, arguments: argparse.Namespace
) -> None:
    of_kind = conversations()[kind]
    if arguments.quick:
        of_kind = [Conversation(turns=each.turns[:2], keeps_answers=each.keeps_answers)
                   for each in of_kind[:2]]  # fmt: skip
    max_new_tokens = 4 if arguments.quick else ANSWER_TOKENS[kind]
    started_s = time.perf_counter()
    recordings: list[Recording] = []
    for start in range(0, len(of_kind), _STREAMS):
        batch = list(enumerate(of_kind))[start : start + _STREAMS]
        recordings += _answered(engine, maker, batch, max_new_tokens)
    recordings.sort(key=lambda each: each.conversation)
    path = arguments.folder / f"{kind}.npz.xz"
    write_recordings(path, recordings)
    num_tokens = sum(len(each.output_token_ids) for each in recordings)
    say(
        f"{kind}: {len(recordings)} answers, {num_tokens} tokens, "
        f"{time.perf_counter() - started_s:.0f} s, {path.stat().st_size} bytes"
    )


def _answered(
    engine: InProcessEngine,
    maker: PromptMaker,
    batch: Sequence[tuple[int, Conversation]],
    max_new_tokens: int,
) -> list[Recording]:
    """All turns of some conversations, turn by turn, so that prompts find what others computed."""
    said: list[list[str]] = [[] for _ in batch]
    found: list[Recording] = []
    for turn in range(max(len(each.turns) for _, each in batch)):
        speaking = [i for i, (_, each) in enumerate(batch) if turn < len(each.turns)]
        for i in speaking:
            conversation = batch[i][1]
            said[i] = [*(said[i] if conversation.keeps_answers else []), conversation.turns[turn]]
        tasks = [
            Task(prompt_token_ids=maker.prompt(said[i]), max_new_tokens=max_new_tokens)
            for i in speaking
        ]
        for i, task, decided in zip(speaking, tasks, _run(engine, tasks), strict=True):
            recording = _recording(batch[i][0], task, decided)
            found.append(recording)
            said[i].append(maker.tokenizer.decode(recording.output_token_ids.tolist()))
    return found


def _run(engine: InProcessEngine, tasks: Sequence[Task]) -> list[list[Decided]]:
    """The decisions of each."""
    decided: list[list[Decided]] = [[] for _ in tasks]

    def observe(event: Decided) -> None:
        decided[int(event.sequence_id)].append(event)

    engine.run(
        tasks,
        streams=min(_STREAMS, len(tasks)),
        speculate=False,
        logprobs=NUM_TOP,
        observe=observe,
    )
    return decided


def _recording(conversation: int, task: Task, decided: Sequence[Decided]) -> Recording:
    tops = [logprob.top for event in decided for logprob in event.logprobs]
    return Recording(
        conversation=conversation,
        prompt_token_ids=np.array(task.prompt_token_ids, dtype=np.uint32),
        output_token_ids=np.array(
            [token_id for event in decided for token_id in event.token_ids], dtype=np.uint32
        ),
        top_token_ids=np.array([[each.token_id for each in top] for top in tops], np.uint32),
        top_logprobs=np.array([[each.logprob for each in top] for top in tops], np.float32),
    )


if __name__ == "__main__":
    configure_logs("warning", "benchmark")
    main()
