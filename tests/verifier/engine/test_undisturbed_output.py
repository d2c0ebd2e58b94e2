"""For every family of the own decoder: drafts, neighbours, chunks, cached prefixes, preemptions and
going on in another engine change no token and no bit of a logit.

The oracle runs each sequence alone, its prompt in one chunk, with no cache and no drafts.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import pytest

from tandem.values import DraftWait
from tests.verifier.cpu.running_decoder import some_tokens, weights_of
from tests.verifier.cpu.test_loader import CONFIGS
from tests.verifier.quantized_files import METHODS
from tests.verifier.running_engine import PATIENCE_S, EngineSession, RecordingObserver
from tests.verifier.scoring_engine import score, stacked
from tests.volume import cases
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import FloatArray, StepHandle, StepResult, TargetModel
from verifier.build import LoadedModel, build_engine
from verifier.checkpoint.families import FAMILIES
from verifier.config import VerifierConfig
from verifier.cpu.decoder import BLOCK_SIZE, CpuDecoder
from verifier.cpu.weights import DecoderWeights
from verifier.engine.engine import Engine
from verifier.engine.messages import Decided, Opened
from verifier.engine.observation import StepRecord
from verifier.sampling import Sampling
from verifier.sampling.rejection_sampler import JudgedSequence
from verifier.scheduling.sequence import ScoringMethod
from verifier.service.score_call import DraftsToScore

NUM_NEW_TOKENS = 30
# Windows see 20 tokens. The factors of longrope change after 128, which the first one never passes,
# and the second one while it runs.
LENGTHS = (90, 109, 330)
LONGER = {"bundled": (180, 500, 1010)}
SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(temperature=2.5, top_k=40, seed=2**63 + 5)}
TYPES = ("float32", "bfloat16")
SUBJECTS = [
    ("bundled", "float32"),
    *((name, each) for i, name in enumerate(CONFIGS) for each in cases(TYPES[i % 2 :][:1], TYPES)),
    *((f"gguf_{name}", "auto") for name in ("llama", "gemma3", "gpt-oss", "qwen35")),
    *((name, "bfloat16") for name in METHODS),
]

# With recurrent states beside K/V.
STATEFUL = [("qwen3_next", "float32")]

Key = tuple[str, int]
"""A sampling's name, and the length of a prompt."""


class WatchedModel:
    """The model, and the logits of its last step."""

    def __init__(self, model: TargetModel) -> None:
        self.vocab_size = model.vocab_size
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
    """A started engine, and one session."""

    engine: Engine
    observer: LogitsObserver
    session: EngineSession

    def logits(self, sequence_id: str, length: int) -> FloatArray:
        """The logits of all output tokens from position `length` on."""
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


@dataclass(frozen=True)
class Subject:
    """A model, what an engine takes besides, and the oracle's outputs and logits."""

    weights: DecoderWeights
    loaded: LoadedModel
    config: VerifierConfig
    prompts: dict[int, list[int]]
    outputs: dict[Key, list[int]] = field(default_factory=dict)
    logits: dict[Key, FloatArray] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(
        self, *, num_blocks: int = 512, num_state_slots: int = 18, **options: object
    ) -> Iterator[Watched]:
        """An engine of its own, with K/V of its own.

        Args:
            num_state_slots: if the model has recurrent states.
        """
        config = self.config.model_copy(update=options)
        decoder = CpuDecoder(
            self.weights,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_threads=1,
            max_num_tokens=config.max_num_batched_tokens,
            num_state_slots=num_state_slots,
        )
        model = WatchedModel(decoder)
        observer = LogitsObserver(model=model)
        loaded = dataclasses.replace(
            self.loaded,
            model=model,
            served=dataclasses.replace(
                self.loaded.served, num_kv_blocks=num_blocks, vocab_size=decoder.vocab_size
            ),
            num_state_slots=num_state_slots if self.weights.delta else 0,
            max_short_tokens=next(
                (r.max_short_tokens for r in self.weights.rotaries if r.long_inv_freq is not None),
                None,
            ),
        )
        engine = build_engine(loaded, config, [observer])
        engine.start()
        watched = Watched(engine=engine, observer=observer, session=EngineSession(engine))
        yield watched
        watched.stop()
        decoder.close()

    def check(
        self,
        watched: Watched,
        *keys: Key,
        num_known: int = 0,
        shares_prefixes: bool = True,
        places: Callable[[int], tuple[int, int]] | None = None,
    ) -> list[str]:
        """Runs sequences together, with drafts. Returns their ids.

        Args:
            num_known: output tokens that each begins with.
            places: by a sequence's length, how many drafts a hint has, and which one is wrong.
        """
        opened: dict[str, Key] = {}
        for i, key in enumerate(keys):
            sequence_id = watched.session.open(
                self.prompts[key[1]] + self.outputs[key][:num_known],
                prompt_length=key[1],
                sampling=SAMPLINGS[key[0]],
                max_new_tokens=NUM_NEW_TOKENS,
                num_speculative_tokens=31,
                draft_wait=DraftWait.ADAPTIVE if i % 4 == 3 else DraftWait.ALWAYS,
                priority=i % 2,
                cache_salt="" if shares_prefixes else str(i),
            )
            opened[sequence_id] = key
        self._draft(watched.session, opened, places or (lambda length: (6, length % 8)))
        for sequence_id, key in opened.items():
            assert watched.session.output(sequence_id) == self.outputs[key][num_known:], key
            logits = watched.logits(sequence_id, key[1] + num_known)
            assert np.array_equal(logits, self.logits[key][num_known:]), f"{key}: other bits"
        return list(opened)

    def _draft(
        self,
        session: EngineSession,
        opened: dict[str, Key],
        places: Callable[[int], tuple[int, int]],
    ) -> None:
        """Runs all to their ends, with hints that are right, partly wrong, or empty."""
        seen = num_ended = num_drafts = num_accepted = 0
        while num_ended < len(opened):
            while seen == len(session.events):
                session.read()
            event = session.events[seen]
            seen += 1
            if not isinstance(event, Decided) or event.sequence_id not in opened:
                continue
            num_drafts += event.num_draft_tokens
            num_accepted += event.num_accepted_tokens
            num_ended += event.finish_reason is not None
            key = opened[event.sequence_id]
            length = event.base_length + len(event.token_ids)
            num_hinted, wrong = places(length)
            hint = self.outputs[key][length - key[1] :][:num_hinted]
            if wrong < len(hint):
                hint[wrong] = (hint[wrong] + 1) % self.weights.vocab_size
            session.hint(event.sequence_id, length, hint if wrong <= num_hinted else [])
        assert num_drafts > num_accepted > 0


@pytest.fixture(scope="module", params=SUBJECTS, ids="-".join)
def subject(
    request: pytest.FixtureRequest, bundled_model: LoadedModel, bundled_config: VerifierConfig
) -> Subject:
    weights = weights_of(*request.param)
    lengths = LONGER.get(request.param[0], LENGTHS)
    text = some_tokens(lengths[-1], weights.vocab_size, seed=8)
    prompts = {length: text[:length] for length in lengths}
    subject = Subject(weights, bundled_model, bundled_config, prompts)
    with subject.running(prefix_cache=False, max_num_batched_tokens=lengths[-1]) as watched:
        for name, sampling in SAMPLINGS.items():
            for length, prompt in prompts.items():
                sequence_id = watched.session.open(
                    prompt, sampling=sampling, max_new_tokens=NUM_NEW_TOKENS
                )
                watched.session.wait_end(sequence_id)
                subject.outputs[name, length] = watched.session.output(sequence_id)
                subject.logits[name, length] = watched.logits(sequence_id, length)
        assert watched.engine.load.num_prefix_cache_queries == 0
    # What could not differ would show nothing.
    assert len({tuple(output) for output in subject.outputs.values()}) == len(subject.outputs)
    return subject


def test_every_family_is_among_the_subjects() -> None:
    assert {name.removesuffix("_text") for name in FAMILIES} <= {name for name, _ in SUBJECTS}


def test_drafts_change_nothing_of_a_sequence_that_is_alone(subject: Subject) -> None:
    with subject.running(prefix_cache=False, max_num_batched_tokens=2048) as watched:
        for key in subject.outputs:
            subject.check(watched, key)


def test_neighbours_chunks_and_cached_prefixes_change_nothing(subject: Subject) -> None:
    with subject.running(max_num_batched_tokens=64) as watched:
        subject.check(watched, *subject.outputs)
        ids = subject.check(watched, *subject.outputs)
        cached = [e.num_cached_tokens for id_ in ids for e in watched.session.of(id_)
                  if isinstance(e, Opened)]  # fmt: skip
        assert cached == [(key[1] - 1) // BLOCK_SIZE * BLOCK_SIZE for key in subject.outputs]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemptions_change_nothing(subject: Subject, prefix_cache: bool) -> None:
    # As many as the longest one needs.
    num_blocks = -(-(max(subject.prompts) + NUM_NEW_TOKENS) // BLOCK_SIZE)
    with subject.running(
        num_blocks=num_blocks, num_state_slots=4, prefix_cache=prefix_cache
    ) as watched:
        subject.check(watched, *subject.outputs, shares_prefixes=False)
        assert watched.engine.load.num_preemptions > 0


def test_what_goes_on_elsewhere_is_the_same(subject: Subject) -> None:
    with subject.running() as watched:
        subject.check(watched, *subject.outputs, num_known=13)


@pytest.mark.parametrize("subject", STATEFUL, indirect=True, ids="-".join)
@pytest.mark.parametrize("num_drafts", cases((1, 3, 29), range(1, 30)))
def test_recurrent_states_take_in_any_number_of_drafts(subject: Subject, num_drafts: int) -> None:
    draw = random.Random(num_drafts)
    with subject.running(max_num_batched_tokens=128) as watched:
        subject.check(
            watched,
            *subject.outputs,
            places=lambda _: (num_drafts, draw.randint(0, num_drafts)),
        )


@pytest.mark.parametrize("subject", STATEFUL, indirect=True, ids="-".join)
@pytest.mark.parametrize("max_num_batched_tokens", [24, 2048])
def test_scores_of_a_model_with_recurrent_states(
    subject: Subject, max_num_batched_tokens: int
) -> None:
    """By both methods, whole and in chunks, with and without a cached prefix."""
    [length, *_] = LENGTHS
    prompt, output = subject.prompts[length], subject.outputs["greedy", length]
    scored = DraftsToScore(token_ids=prompt, draft_token_ids=output[:9])
    logits, as_it_is = subject.logits["greedy", length][:10], Sampling(temperature=1.0)
    with subject.running(max_num_batched_tokens=max_num_batched_tokens) as watched:
        for method in ScoringMethod:
            [scores] = score(watched.engine, [scored], method=method, sampling=as_it_is)
            expected = np.stack([row.argmax() for row in logits]).tolist()
            assert [position.top_token_id for position in scores.positions] == expected
            shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
            shares = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
            np.testing.assert_allclose(stacked(scores, "probs").numpy(), shares, atol=1e-6)
            [scores] = score(watched.engine, [scored], method=method, prompt_logprobs=2)
            assert len(scores.prompt_logprobs) == length - 1


@pytest.mark.parametrize("subject", STATEFUL, indirect=True, ids="-".join)
@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_chat_with_recurrent_states_goes_on_behind_its_last_answer(
    subject: Subject, has_drafts: bool
) -> None:
    """Up to the last whole block of it, with the bits that it has without a cache."""
    key = "greedy", LENGTHS[0]
    prompt, vocab_size = subject.prompts[LENGTHS[0]], subject.weights.vocab_size
    next_turn = [*prompt, *subject.outputs[key], *some_tokens(9, vocab_size, seed=5)]
    told, outputs, logits = [], [], []
    for prefix_cache in (False, True):
        with subject.running(prefix_cache=prefix_cache) as watched:
            session = watched.session
            if has_drafts:
                subject.check(watched, key)
            else:
                session.wait_end(session.open(prompt, max_new_tokens=NUM_NEW_TOKENS))
            sequence_id = session.open(next_turn, max_new_tokens=NUM_NEW_TOKENS)
            session.wait_end(sequence_id)
            told += [e.num_cached_tokens for e in session.of(sequence_id) if isinstance(e, Opened)]
            outputs.append(session.output(sequence_id))
            logits.append(watched.logits(sequence_id, len(next_turn)))
    num_computed = len(prompt) + NUM_NEW_TOKENS - 1
    assert told == [0, num_computed // BLOCK_SIZE * BLOCK_SIZE]
    assert outputs[0] == outputs[1]
    assert np.array_equal(logits[0], logits[1])
