"""Sampled distribution (docs/acceptance.md): the model's, also where sequences are preempted."""

import collections
import itertools
import math
import random

import numpy as np

from tandem.values import DraftWait
from tests.scripted_model import ScriptedModel
from tests.verifier.running_engine import (
    EngineSession,
    RecordingObserver,
    StartEngine,
    is_terminal,
)
from tests.verifier.sampling.goodness_of_fit import follows
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import FloatArray
from verifier.engine.messages import Decided
from verifier.engine.observation import StepRecord
from verifier.sampling import Sampling

# Of the next token, by the last one.
PROBS = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.34, 0.33, 0.33]])
NUM_BLOCKS, BLOCK_SIZE, NUM_NEW_TOKENS = 12, 2, 4
NUM_SEQUENCES, NUM_AT_ONCE = 4000, 28


class MarkovModel(ScriptedModel):
    """Knows the last token from its paged memory only."""

    def __init__(self) -> None:
        super().__init__(
            lambda known: known[-1],
            num_slots=NUM_BLOCKS * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            vocab_size=len(PROBS),
        )

    def forward(self, layout: BatchLayout) -> FloatArray:
        last = super().forward(layout).argmax(axis=1)
        logits: FloatArray = np.log(PROBS).astype(np.float32)[last]
        return logits


class ForgetfulObserver(RecordingObserver):
    def stepped(self, record: StepRecord) -> None:
        pass


def test_the_joint_law_of_preempted_outputs_is_the_models(start_engine: StartEngine) -> None:
    running = start_engine(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        observer=ForgetfulObserver(),
    )
    with running.held():
        running.engine._model = MarkovModel()
    session = EngineSession(running.engine)
    draw = random.Random(1)
    open_outputs: dict[str, list[int]] = {}
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    num_opened = num_accepted = 0
    while num_opened < NUM_SEQUENCES or open_outputs:
        while num_opened < NUM_SEQUENCES and len(open_outputs) < NUM_AT_ONCE:
            num_opened += 1
            sequence_id = session.open(
                [0],
                sampling=Sampling(temperature=1.0, seed=draw.getrandbits(63)),
                max_new_tokens=NUM_NEW_TOKENS,
                num_speculative_tokens=3,
                draft_wait=draw.choice([DraftWait.ALWAYS, DraftWait.ALWAYS, DraftWait.NEVER]),
                priority=draw.choice([0, 0, 1]),
            )
            open_outputs[sequence_id] = []
        session.read()
        events, session.events = session.events, []
        for event in events:
            if not isinstance(event, Decided):
                continue
            output = open_outputs[event.sequence_id]
            output += event.token_ids
            num_accepted += event.num_accepted_tokens
            if is_terminal(event):
                counts[tuple(open_outputs.pop(event.sequence_id))] += 1
            else:
                draft = draw.choices(range(len(PROBS)), k=3)
                session.hint(event.sequence_id, 1 + len(output), draft)
    assert running.engine.load.num_preemptions > NUM_SEQUENCES // 20
    assert num_accepted > NUM_SEQUENCES // 10
    for last, law in enumerate(PROBS):
        following = collections.Counter(
            new
            for output in counts.elements()
            for before, new in itertools.pairwise((0, *output))
            if before == last
        )
        assert follows([following[new] for new in range(len(law))], law)
    outputs = list(itertools.product(range(len(PROBS)), repeat=NUM_NEW_TOKENS))
    assert follows([counts[output] for output in outputs], list(map(probability, outputs)))


def probability(output: tuple[int, ...]) -> float:
    return math.prod(float(PROBS[last, new]) for last, new in itertools.pairwise((0, *output)))
