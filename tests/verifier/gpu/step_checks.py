"""Steps sampled on the device against the same steps sampled on the host, in an engine.

Run in Triton's interpreter by `test_in_the_interpreter.py`, on a GPU by
`tests/gpu/test_device_step.py`.
There, graphs are CUDA's and kernels are Triton's; here, graphs are a stand-in's and layers are
computed in plain torch.
"""

import contextlib
import functools
import re
import tempfile
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tandem.values import StructuredOutput
from tests.verifier.cpu.running_decoder import MODEL_FOLDER
from tests.verifier.cpu.test_loader import save
from tests.verifier.gpu.graph_stand_in import RecordingCapture
from tests.verifier.gpu.running_decoder import load
from tests.verifier.gpu.tables_attention import TablesBackend
from tests.verifier.gpu.test_decoder import transformers_logits
from tests.verifier.gpu_sampling.device_batches import DEVICE
from tests.verifier.paged_model import some_tokens
from tests.verifier.running_engine import (
    PATIENCE_S,
    EngineSession,
    RecordingObserver,
    check_contract,
    no_link,
)
from tests.verifier.triton.triton_interpreter import interpreted_cases
from verifier.attention.backend import AttentionBackend
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.batch.target_model import StepHandle, StepResult
from verifier.drafters.drafters import Drafters
from verifier.engine.engine import Engine, EngineOptions
from verifier.engine.messages import Decided, Rejected
from verifier.engine.observation import Observers
from verifier.gpu.attention.triton_backend import TritonBackend
from verifier.gpu.decoder import GpuDecoder, Graphs, WrittenCache, kv_shape_of
from verifier.gpu.device_batch import BatchLimits
from verifier.gpu.device_step import DeviceStep, StepSampler
from verifier.gpu.graph_pool import Capture, CudaCapture, GraphLimits
from verifier.gpu.layers.states import states_of
from verifier.gpu.sampling.sampler import DeviceSampler
from verifier.gpu.weights import GpuWeights
from verifier.sampling import Sampling
from verifier.sampling.adjustments import Adjustments
from verifier.sampling.logits_processing import History
from verifier.sampling.rejection_sampler import JudgedSequence, Verdict
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.scheduler import Scheduler
from verifier.structured.grammar import Grammar
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind

# The interpreter computes in numpy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NUM_STATE_SLOTS = 8
MAX_DRAFTS, MAX_SEQS, MAX_TOKENS, BLOCK_SIZE, MAX_LENGTH = 4, 6, 24, 16, 128
TEXT = some_tokens(60, 97)
NUM_NEW_TOKENS = interpreted_cases(9, 14)


@functools.cache
def weights_of(name: str) -> GpuWeights:
    """Of a random model of `CONFIGS`; "bundled": of the demo model."""
    if name == "bundled":
        return load(MODEL_FOLDER, "float32", DEVICE)
    return load(Path(saved(name).name), device=DEVICE)


@functools.cache
def saved(name: str) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    save(Path(folder.name), name)
    return folder


def capture() -> Capture:
    return CudaCapture(DEVICE) if DEVICE.type == "cuda" else RecordingCapture()


def decoder_of(
    weights: GpuWeights,
    *,
    num_blocks: int,
    backend: AttentionBackend | None = None,
    graphs: Graphs | None = None,
    samples_on_device: bool = False,
) -> GpuDecoder:
    """`samples_on_device`: else the host samples."""
    if backend is None:
        backend = TritonBackend(device=DEVICE) if DEVICE.type == "cuda" else TablesBackend(1e30)
    sampler = None
    if samples_on_device:
        sampler = StepSampler(
            DeviceSampler(
                device=DEVICE,
                vocab_size=weights.config.vocab_size,
                max_num_seqs=MAX_SEQS,
                max_num_drafts=MAX_DRAFTS,
                max_num_rows=MAX_TOKENS,
            )
        )
    return GpuDecoder(
        weights,
        backend=backend,
        cache=WrittenCache(
            kv_shape_of(weights.config, weights.dtype),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            device=DEVICE,
        ),
        limits=BatchLimits(
            max_num_tokens=MAX_TOKENS,
            max_num_tables=MAX_SEQS,
            max_table_blocks=MAX_LENGTH // BLOCK_SIZE,
            num_state_slots=NUM_STATE_SLOTS,
        ),
        states=states_of(
            weights.config,
            num_slots=NUM_STATE_SLOTS,
            max_drafts=MAX_DRAFTS,
            dtype=weights.dtype,
            device=DEVICE,
        ),
        sampler=sampler,
        graphs=graphs,
    )


class Twins:
    """A target model that computes each step twice: by its `own` way and by the host's sampler."""

    def __init__(self, own: GpuDecoder, host: GpuDecoder) -> None:
        self.vocab_size = own.vocab_size
        self.computes_at_launch = own.computes_at_launch
        self.own = own
        self.host = host
        self.num_reported = 0

    def launch(self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]) -> StepHandle:
        handles = [each.launch(layout, sequences) for each in (self.own, self.host)]
        assert isinstance(handles[0], DeviceStep)
        return _TwinStep(self, layout, handles)


class _TwinStep:
    def __init__(self, twins: Twins, layout: BatchLayout, handles: list[StepHandle]) -> None:
        self._twins = twins
        self._layout = layout
        self._handles = handles

    def wait(self) -> None:
        for each in self._handles:
            each.wait()

    def result(self) -> StepResult:
        own, host = (each.result() for each in self._handles)
        assert own.verdict.failures.keys() == host.verdict.failures.keys()
        failed = list(host.verdict.failures)
        assert_same(_without(own.verdict, failed), _without(host.verdict, failed))
        assert (own.kv_is_finite is None) == (host.kv_is_finite is None)
        if own.kv_is_finite is not None and host.kv_is_finite is not None:
            np.testing.assert_array_equal(own.kv_is_finite, host.kv_is_finite)
        scored = self._layout.scored_logits_indices
        np.testing.assert_array_equal(own.logits_of(scored), host.logits_of(scored))
        for ours, theirs in [(own.hidden_states, host.hidden_states)]:
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                np.testing.assert_array_equal(ours, theirs)
        self._twins.num_reported += len(own.verdict.logprobs)
        return own


def _without(verdict: Verdict, failed: list[int]) -> Verdict:
    """Without the sequences that failed."""
    left = np.setdiff1d(np.arange(len(verdict.num_accepted_tokens)), failed)
    return Verdict(
        output_token_ids=verdict.output_token_ids[left],
        num_accepted_tokens=verdict.num_accepted_tokens[left],
        is_finite=verdict.is_finite[left],
        logprobs={i: each for i, each in verdict.logprobs.items() if i not in failed},
        failures={},
    )


def assert_same(own: Verdict, host: Verdict) -> None:
    np.testing.assert_array_equal(own.output_token_ids, host.output_token_ids)
    np.testing.assert_array_equal(own.num_accepted_tokens, host.num_accepted_tokens)
    np.testing.assert_array_equal(own.is_finite, host.is_finite)
    assert own.logprobs == host.logprobs


@dataclass
class Running:
    engine: Engine
    twins: Twins
    scheduler: Scheduler
    observer: RecordingObserver


@contextlib.contextmanager
def running(
    name: str,
    *,
    num_blocks: int = 40,
    weights: GpuWeights | None = None,
) -> Iterator[Running]:
    """An engine over twins, with graphs up to 16 tokens, of which some are captured late."""
    weights = weights or weights_of(name)
    limits = GraphLimits(buckets=(1, 2, 4, 8, 16), max_bytes=1 << 30, max_prepare_s=60.0)
    own, host = (
        decoder_of(
            weights,
            num_blocks=num_blocks,
            graphs=Graphs(capture=capture(), limits=limits),
            samples_on_device=each,
        )
        for each in (True, False)
    )
    own.warm_up()
    host.warm_up()
    twins, observer = Twins(own, host), RecordingObserver()
    observers = Observers([observer])
    scheduler = Scheduler(
        block_pool=BlockPool(num_blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_scored_rows=16,
        num_state_slots=NUM_STATE_SLOTS if weights.config.delta else 0,
    )
    engine = Engine(
        model=twins,
        scheduler=scheduler,
        options=EngineOptions(
            max_model_len=MAX_LENGTH,
            max_num_waiting=50,
            max_waiting_tokens=1 << 20,
            draft_timeout_s=PATIENCE_S,
        ),
        drafters=Drafters(
            open_link=no_link,
            vocab_size=twins.vocab_size,
            unused_timeout_s=PATIENCE_S,
            count_fault=observers.drafter_failed,
        ),
        observer=observers,
    )
    engine.start()
    try:
        yield Running(engine, twins, scheduler, observer)
        engine.when_idle().result(PATIENCE_S)
        engine.call(engine.check_integrity).result(PATIENCE_S)
    finally:
        engine.stop()
        engine.stopped.result(PATIENCE_S)
    assert observer.faults == []


def serve(
    engine: Engine,
    requests: list[dict[str, Any]],
    guesses: Mapping[int, list[int]] | None = None,
) -> tuple[list[list[int]], EngineSession]:
    """The outputs of all requests, opened at once.

    Args:
        guesses: of each request by index, what its output may be: hints are made of it.
    """
    session = EngineSession(engine)
    ids = [session.open(**request) for request in requests]
    seen = 0
    ended: set[str] = set()
    while len(ended) < len(ids):
        session.read()
        for event in session.events[seen:]:
            if isinstance(event, Rejected):
                raise AssertionError(f"{event}")
            if not isinstance(event, Decided):
                continue
            if event.finish_reason is not None:
                ended.add(event.sequence_id)
            elif guesses is not None and event.num_wanted_draft_tokens:
                index = ids.index(event.sequence_id)
                base = event.base_length + len(event.token_ids)
                at = base - len(requests[index]["token_ids"])
                if draft := guesses[index][at : at + MAX_DRAFTS]:
                    session.hint(event.sequence_id, base, draft)
        seen = len(session.events)
    check_contract(session)
    outputs = [session.output(each) for each in ids]
    session.detach()
    return outputs, session


def requests_of(vocab_size: int) -> list[dict[str, Any]]:
    """More than run at once; one prompt is longer than a step."""
    parameters = [
        Sampling(),
        Sampling(temperature=0.9, seed=3),
        Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=4),
        Sampling(repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2),
        Sampling(temperature=0.8, frequency_penalty=0.5, seed=5, min_new_tokens=6),
        Sampling(logprobs=3),
        Sampling(temperature=1.0, seed=6, logprobs=0, prompt_logprobs=1),
        Sampling(logit_bias={5: 3.0, 7: -2.0}, temperature=0.7, seed=7, prompt_logprobs=0),
        Sampling(logit_bias=dict.fromkeys(range(min(vocab_size, 30)), 0.5)),
    ]
    lengths = (3, 20, 1, 45, 17, 9, 12, 30, 2)
    return [
        {
            "token_ids": [t % vocab_size for t in TEXT[nth : nth + length]],
            "sampling": sampling,
            "max_new_tokens": NUM_NEW_TOKENS,
            "num_speculative_tokens": MAX_DRAFTS,
            "stop_token_ids": frozenset({1, 2}) if sampling.min_new_tokens else frozenset(),
        }
        for nth, (length, sampling) in enumerate(zip(lengths, parameters, strict=True))
    ]


def spoiled(outputs: list[list[int]], vocab_size: int) -> dict[int, list[int]]:
    """The outputs, with another token here and there."""
    return {
        index: [t if (index + at) % 5 else (t + 1) % vocab_size for at, t in enumerate(output)]
        for index, output in enumerate(outputs)
    }


def greedy_by_transformers(name: str, prompt: list[int], count: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(count):
        logits = transformers_logits(Path(saved(name).name), token_ids)
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("name", interpreted_cases(["qwen3"], ["qwen3", "mistral"]))
def test_sessions_get_the_tokens_of_the_host(name: str) -> None:
    """Each step of all of them: chunks, drafts, penalties, logprobs, scored prompts."""
    requests = requests_of(97)
    with running(name) as world:
        plain, _ = serve(world.engine, requests)
        drafted, session = serve(world.engine, requests, spoiled(plain, 97))
        assert world.twins.num_reported > 0
        graphs = world.twins.own._graphs
        assert graphs is not None
        assert graphs.captured == [1, 2, 4, 8, 16]
    accepted = sum(e.num_accepted_tokens for e in session.events if isinstance(e, Decided))
    assert accepted > 0
    assert accepted < world.observer.num_drafts_scheduled
    assert plain[0] == greedy_by_transformers(name, requests[0]["token_ids"], NUM_NEW_TOKENS)
    assert drafted == plain


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_sessions_that_are_preempted_get_the_tokens_of_the_host(name: str) -> None:
    """All begin with one block, and need three. Recurrent states are computed anew, or begin with
    those of a prompt.
    """
    requests = [
        {**each, "token_ids": TEXT[nth : nth + 14], "max_new_tokens": 20}
        for nth, each in enumerate(requests_of(97)[1 : interpreted_cases(4, 6)])
    ]
    with running(name) as world:
        plain, _ = serve(world.engine, requests)
    num_blocks = len(requests) + 2
    with running(name, num_blocks=num_blocks) as world:
        drafted, _ = serve(world.engine, requests, spoiled(plain, 97))
    assert world.scheduler.counts.num_preemptions > 0
    assert world.observer.num_drafts_scheduled > 0
    assert drafted == plain


def test_a_grammar_is_followed() -> None:
    """Its masks are applied on the device."""
    vocab_size = weights_of("bundled").config.vocab_size
    grammars = Grammars(MODEL_FOLDER / "tokenizer.json", vocab_size=vocab_size, end_token_ids=[0])
    grammar = Grammar(GrammarKind.REGEX, "(yes|no|perhaps){3}")
    with contextlib.closing(grammars), running("bundled") as world:
        outputs, _ = serve(
            world.engine,
            [
                {
                    "token_ids": [token % vocab_size for token in TEXT[:6]],
                    "sampling": Sampling(
                        temperature=temperature, seed=9, structured_output=StructuredOutput()
                    ),
                    "max_new_tokens": 30,
                    "num_speculative_tokens": MAX_DRAFTS,
                    "stop_token_ids": frozenset({0}),
                    "grammar": grammars.compile(grammar).result(PATIENCE_S),
                }
                for temperature in (0.0, 1.0)
            ],
        )
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    for output in outputs:
        text = tokenizer.decode(output, skip_special_tokens=True)
        assert re.fullmatch("(yes|no|perhaps){3}", text), text


class Raising:
    """A constraint that fails."""

    def allows(self, token_ids: object) -> bool:
        return False

    def allowed(self, draft_token_ids: object) -> Any:
        raise ValueError("too complex")


def judged(sampling: Sampling, adjustments: Adjustments | None = None) -> JudgedSequence:
    history = History(adjustments=adjustments, draft_token_ids=[])
    return JudgedSequence(sampling=sampling, history=history, first_position=3)


def test_a_sequence_that_cannot_be_sampled_fails_alone() -> None:
    """By its grammar, by its parameters, by its logprobs; on the host and on the device."""
    constrained = Sampling(structured_output=StructuredOutput())
    raising = Adjustments(constrained, prompt_length=3, constraint=Raising())
    sequences = [
        judged(Sampling()),
        judged(constrained, raising),
        judged(Sampling(temperature=1.0, seed=2)),
        judged(Sampling(temperature=1.0, seed="x")),  # type: ignore[arg-type]
        judged(Sampling(logprobs=2)),
        judged(Sampling(logprobs="x")),  # type: ignore[arg-type]
    ]
    layout = lay_out(
        [
            ScheduledTokens(
                token_ids=TEXT[nth : nth + 3],
                draft_token_ids=[],
                num_computed_tokens=0,
                block_table=[nth],
                table_id=nth,
            )
            for nth in range(len(sequences))
        ],
        block_size=BLOCK_SIZE,
    )
    own = decoder_of(weights_of("qwen3"), num_blocks=8, samples_on_device=True)
    host = decoder_of(weights_of("qwen3"), num_blocks=8)
    results = []
    for _ in range(2):
        for decoder in (own, host):
            step = decoder.launch(layout, sequences)
            step.wait()
            results.append(step.result())
    for result in results:
        failed = sorted(result.verdict.failures)
        assert failed == [1, 3, 5]
        assert_same(_without(result.verdict, failed), _without(results[1].verdict, failed))
    assert results[0].verdict.logprobs[4]
