"""Cached prefixes, preemptions and how drafts are run change no token and no bit of a logit.

The bundled model in float32, computed by the own decoder. The oracle runs each sequence alone, from
its first token, with no cache and no drafts.
"""

import dataclasses
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import pytest

from tandem.values import DraftWait
from tests.verifier.paged_model import some_tokens
from tests.verifier.running_engine import PATIENCE_S, EngineSession, RecordingObserver
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import (
    FloatArray,
    StepHandle,
    StepResult,
    TargetModel,
)
from verifier.build import LoadedModel, build_engine
from verifier.config import VerifierConfig
from verifier.cpu.decoder import CpuDecoder
from verifier.engine.engine import Engine
from verifier.engine.messages import Decided, Opened
from verifier.engine.observation import StepRecord
from verifier.sampling import Sampling
from verifier.sampling.rejection_sampler import JudgedSequence

NUM_NEW_TOKENS = 30
LENGTHS = (180, 500, 1010)
SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(temperature=0.9, top_k=40, seed=2**63 + 5)}


class WatchedModel:
    """The model, and the logits of its last step."""

    def __init__(self, model: TargetModel) -> None:
        self.vocab_size = model.vocab_size
        self.row_tile = model.row_tile
        self.computes_at_launch = model.computes_at_launch
        self.logits = np.empty(0, dtype=np.float32)
        self._model = model

    def launch(self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]) -> StepHandle:
        return _WatchedStep(self, self._model.launch(layout, sequences), layout.num_rows)


class _WatchedStep:
    def __init__(self, model: WatchedModel, handle: StepHandle, num_rows: int) -> None:
        self._model = model
        self._handle = handle
        self._num_rows = num_rows

    def wait(self) -> None:
        self._handle.wait()

    def result(self) -> StepResult:
        result = self._handle.result()
        self._model.logits = result.logits_of(np.arange(self._num_rows))
        return result


@dataclass
class LogitsObserver(RecordingObserver):
    """Keeps the logits that each token was sampled from, by sequence id and position."""

    model: WatchedModel | None = None
    logits: dict[tuple[str, int], FloatArray] = field(default_factory=dict)

    def stepped(self, record: StepRecord) -> None:
        assert self.model is not None
        layout, row = record.layout, 0
        for i, item in enumerate(record.scheduled):
            for j in range(int(layout.num_sampled_tokens[i])):
                position = int(layout.positions[layout.logits_indices[row]]) + 1
                if item.is_sampled and j <= int(record.verdict.num_accepted_tokens[i]):
                    key = (item.sequence.sequence_id, position)
                    assert key not in self.logits, "a token was decided twice"
                    self.logits[key] = self.model.logits[row].copy()
                row += 1


@dataclass
class Watched:
    """A started engine over the bundled model, and one session."""

    engine: Engine
    observer: LogitsObserver
    session: EngineSession

    def logits(self, sequence_id: str, length: int) -> FloatArray:
        """The logits of all output tokens after a prompt of `length`."""
        # Observers are called after the session has its events.
        self.engine.call(self.engine.check_integrity).result(PATIENCE_S)
        num_tokens = len(self.session.output(sequence_id))
        return np.stack([self.observer.logits[sequence_id, length + i] for i in range(num_tokens)])

    def stop(self) -> None:
        self.session.detach()
        self.engine.when_idle().result(PATIENCE_S)
        self.engine.call(self.engine.check_integrity).result(PATIENCE_S)
        assert self.engine.load.num_kv_blocks_used == 0
        self.engine.stop()
        self.engine.stopped.result(PATIENCE_S)


def start(loaded: LoadedModel, config: VerifierConfig, *, num_blocks: int, **options: object) -> (
    Watched
):  # fmt: skip
    model = WatchedModel(loaded.model)
    served = dataclasses.replace(loaded.served, num_kv_blocks=num_blocks)
    observer = LogitsObserver(model=model)
    engine = build_engine(
        dataclasses.replace(loaded, model=model, served=served),
        config.model_copy(update=options),
        [observer],
    )
    engine.start()
    return Watched(engine=engine, observer=observer, session=EngineSession(engine))


@dataclass(frozen=True)
class Oracle:
    """Outputs and logits by sampling and prompt length."""

    prompts: dict[int, list[int]]
    outputs: dict[tuple[str, int], list[int]]
    logits: dict[tuple[str, int], FloatArray]


@pytest.fixture(scope="module")
def oracle(bundled_model: LoadedModel, bundled_config: VerifierConfig) -> Oracle:
    assert isinstance(bundled_model.model, CpuDecoder)
    text = some_tokens(max(LENGTHS), bundled_model.served.vocab_size, seed=7)
    oracle = Oracle({length: text[:length] for length in LENGTHS}, {}, {})
    running = start(bundled_model, bundled_config, num_blocks=512, prefix_cache=False)
    for sampling_name, sampling in SAMPLINGS.items():
        for length, prompt in oracle.prompts.items():
            sequence_id = running.session.open(
                prompt, sampling=sampling, max_new_tokens=NUM_NEW_TOKENS
            )
            running.session.wait_end(sequence_id)
            oracle.outputs[sampling_name, length] = running.session.output(sequence_id)
            oracle.logits[sampling_name, length] = running.logits(sequence_id, length)
    assert running.engine.load.num_prefix_cache_queries == 0
    running.stop()
    return oracle


def assert_undisturbed(
    running: Watched, oracle: Oracle, opened: dict[str, tuple[str, int]]
) -> None:
    for sequence_id, key in opened.items():
        assert running.session.output(sequence_id) == oracle.outputs[key], key
        logits = running.logits(sequence_id, key[1])
        assert np.array_equal(logits, oracle.logits[key]), f"{key}: other bits"


def drive(running: Watched, oracle: Oracle, opened: dict[str, tuple[str, int]]) -> None:
    """Runs all to their ends, with hints for every other length, half of them partly wrong."""
    session = running.session
    ended: set[str] = set()
    seen = 0
    while len(ended) < len(opened):
        while seen == len(session.events):
            session.read()
        event = session.events[seen]
        seen += 1
        if not isinstance(event, Decided) or event.sequence_id not in opened:
            continue
        if event.finish_reason is not None:
            ended.add(event.sequence_id)
            continue
        key = opened[event.sequence_id]
        length = event.base_length + len(event.token_ids)
        hint = list(oracle.outputs[key][length - key[1] :][:6])
        if length % 4 == 1 and len(hint) > 2:
            hint[2] = (hint[2] + 1) % 100
        session.hint(event.sequence_id, length, hint if length % 2 else [])


@pytest.mark.parametrize("sampling_name", ["greedy", "seeded"])
def test_with_cached_prefixes(
    bundled_model: LoadedModel,
    bundled_config: VerifierConfig,
    oracle: Oracle,
    sampling_name: str,
) -> None:
    running = start(bundled_model, bundled_config, num_blocks=512)
    session = running.session
    # Whole blocks up to 160 tokens, and up to the middle of a block.
    for length in (165, LENGTHS[1]):
        session.wait_end(session.open(oracle.prompts[LENGTHS[-1]][:length], max_new_tokens=1))
    opened: dict[str, tuple[str, int]] = {}
    for _ in range(2):  # at once: only one of them can continue right after the cached blocks
        for length, prompt in oracle.prompts.items():
            sequence_id = session.open(
                prompt,
                sampling=SAMPLINGS[sampling_name],
                max_new_tokens=NUM_NEW_TOKENS,
                draft_wait=DraftWait.ALWAYS,
            )
            opened[sequence_id] = (sampling_name, length)
    drive(running, oracle, opened)
    assert_undisturbed(running, oracle, opened)
    num_cached = [e.num_cached_tokens for e in session.events if isinstance(e, Opened)]
    assert num_cached[0] == 0
    assert num_cached[1:3] == [160, 176], "the second found the first's, the third the second's"
    assert num_cached[3:5] == [496, 496]
    running.stop()


@pytest.mark.parametrize("sampling_name", SAMPLINGS)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_with_preemptions(
    bundled_model: LoadedModel,
    bundled_config: VerifierConfig,
    oracle: Oracle,
    sampling_name: str,
    prefix_cache: bool,
) -> None:
    # One by one they need 14, 34 and 65 blocks.
    running = start(bundled_model, bundled_config, num_blocks=66, prefix_cache=prefix_cache)
    opened: dict[str, tuple[str, int]] = {}
    for i, length in enumerate((180, 500, 180, 1010)):
        sequence_id = running.session.open(
            oracle.prompts[length],
            sampling=SAMPLINGS[sampling_name],
            max_new_tokens=NUM_NEW_TOKENS,
            draft_wait=DraftWait.ADAPTIVE if i % 2 else DraftWait.ALWAYS,
            priority=i % 2,
            cache_salt=str(i),
        )
        opened[sequence_id] = (sampling_name, length)
    drive(running, oracle, opened)
    assert running.engine.load.num_preemptions > 0
    assert_undisturbed(running, oracle, opened)
    running.stop()
