"""A sequence with K/V that is not finite is rejected alone, and its blocks are not cached.

The bundled model, with an embedding of NaN for some tokens: every token that attends to one fails.
"""

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.values import DraftWait
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.paged_model import some_tokens
from tests.verifier.running_engine import (
    PATIENCE_S,
    EngineSession,
    StartEngine,
    is_terminal,
)
from tests.volume import cases
from verifier.build import LoadedModel, build_engine, load_model
from verifier.config import VerifierConfig
from verifier.cpu.decoder import CpuDecoder
from verifier.engine.engine import Engine
from verifier.engine.messages import Decided, Opened, Rejected
from verifier.errors import NOT_FINITE_KV, ModelOutputError
from verifier.parity.comparison import probe_text
from verifier.sampling import Sampling
from verifier.scheduling.sequence import Scoring, ScoringMethod
from verifier.service.score_call import DraftsToScore, ScoreCall, ScoreOptions
from verifier.transformers_model.paged_model import TransformersModel

VOCAB_SIZE = 2048
BLOCK_SIZE = 16
POISON = [1729, 19, 1000]


@pytest.fixture(scope="module")
def poisoned_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert not set(POISON) & set(probe_text(vocab_size=VOCAB_SIZE, max_model_len=2048))
    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(MODEL_FOLDER, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    # The output layer keeps its own weights.
    weights.setdefault("lm_head.weight", embedding.clone())
    embedding[POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


@pytest.fixture(scope="module", params=["strict", "fast"])
def poisoned(
    request: pytest.FixtureRequest, poisoned_folder: Path, bundled_config: VerifierConfig
) -> tuple[LoadedModel, VerifierConfig]:
    """The own decoder and transformers."""
    numerics = request.param
    config = bundled_config.model_copy(
        update={"model": poisoned_folder, "numerics": numerics, "max_num_batched_tokens": 48}
    )
    loaded = load_model(config)
    assert isinstance(loaded.model, CpuDecoder if numerics == "strict" else TransformersModel)
    return loaded, config


@dataclasses.dataclass
class Running:
    engine: Engine
    session: EngineSession

    def end_of(self, prompt: list[int], **fields: object) -> tuple[str, Decided | Rejected]:
        sequence_id = self.session.open(prompt, **fields)
        return sequence_id, self.session.wait_end(sequence_id)

    def num_cached(self, sequence_id: str) -> int:
        opened = self.session.of(sequence_id)[0]
        assert isinstance(opened, Opened)
        return opened.num_cached_tokens


@pytest.fixture
def running(poisoned: tuple[LoadedModel, VerifierConfig]) -> Iterator[Running]:
    engine = build_engine(*poisoned, [])
    engine.start()
    session = EngineSession(engine)
    try:
        yield Running(engine, session)
        session.detach()
        engine.when_idle().result(PATIENCE_S)
        engine.call(engine.check_integrity).result(PATIENCE_S)
        assert engine.load.num_kv_blocks_used == 0
    finally:
        engine.stop()
        engine.stopped.result(PATIENCE_S)


def healthy_tokens(num_tokens: int, seed: int = 1) -> list[int]:
    return [t for t in some_tokens(2 * num_tokens, VOCAB_SIZE, seed) if t not in POISON][
        :num_tokens
    ]


def assert_rejected(end: Decided | Rejected, message: str = NOT_FINITE_KV) -> None:
    assert isinstance(end, Rejected)
    assert isinstance(end.error, ModelOutputError)
    assert end.error.message == message


# In the first chunk, at the start of the second, in the chunk that ends the prompt, at its end.
@pytest.mark.parametrize("place", cases([0, 48, 130, 139], [0, 20, 47, 48, 95, 130, 139]))
def test_a_prompt_with_a_failing_token_is_rejected_alone(running: Running, place: int) -> None:
    bystander, prompt = healthy_tokens(60, seed=2), healthy_tokens(140)
    [expected_id, expected] = running.end_of(bystander, max_new_tokens=30, cache_salt="before")
    assert isinstance(expected, Decided)

    session = running.session
    poisoned_prompt = [*prompt[:place], POISON[0], *prompt[place + 1 :]]
    beside = session.open(bystander, max_new_tokens=30, cache_salt="beside")
    session.wait_decided(beside, 1)
    failing, end = running.end_of(poisoned_prompt, max_new_tokens=5)
    assert_rejected(end)
    assert not session.output(failing)
    session.wait_end(beside)
    assert session.output(beside) == session.output(expected_id)

    # Its block and later ones are not cached; earlier ones may be.
    max_cached = place // BLOCK_SIZE * BLOCK_SIZE
    again, end = running.end_of(poisoned_prompt, max_new_tokens=5)
    assert_rejected(end)
    assert running.num_cached(again) <= max_cached
    longer, end = running.end_of([*poisoned_prompt, 3], max_new_tokens=5)
    assert_rejected(end)
    assert running.num_cached(longer) <= max_cached
    healthy_ids = [
        running.end_of(prompt, max_new_tokens=5, cache_salt=salt)[0] for salt in ("", "another")
    ]
    assert running.num_cached(healthy_ids[0]) <= max_cached
    outputs = [session.output(sequence_id) for sequence_id in healthy_ids]
    assert outputs[0] == outputs[1]


def test_prompt_logprobs_and_scores_of_a_failing_token_fail(running: Running) -> None:
    prompt = [*healthy_tokens(30), POISON[0], *healthy_tokens(70, seed=3)]
    _, end = running.end_of(prompt, max_new_tokens=2, sampling=Sampling(prompt_logprobs=1))
    assert_rejected(end)
    for method in ScoringMethod:
        scored = [
            DraftsToScore(token_ids=healthy_tokens(60), draft_token_ids=[5]),
            DraftsToScore(token_ids=prompt, draft_token_ids=[5, 6]),
            DraftsToScore(token_ids=healthy_tokens(20), draft_token_ids=[7, POISON[0], 8]),
        ]
        for sequences, is_failing in ((scored[:1], False), (scored[:2], True), (scored[2:], True)):
            options = ScoreOptions(scoring=Scoring(method=method, num_top=1), sampling=Sampling())
            call = ScoreCall(running.engine, sequences, options)
            if is_failing:
                with pytest.raises(ModelOutputError) as raised:
                    call.result.result(PATIENCE_S)
                assert raised.value.field == f"sequences[{len(sequences) - 1}]"
            else:
                assert len(call.result.result(PATIENCE_S)) == 1
            call.close()


SAMPLINGS = {
    "greedy": Sampling(logprobs=2),
    "random": Sampling(temperature=1.5, top_k=50, seed=7, logprobs=1),
    "penalised": Sampling(
        temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.2, seed=11, logprobs=0
    ),
}


@pytest.mark.parametrize("poisoned", ["strict"], indirect=True)
@pytest.mark.parametrize("sampling_name", SAMPLINGS)
@pytest.mark.parametrize("seed", range(cases(2, 6)))
def test_any_drafts_end_as_without_drafts(running: Running, sampling_name: str, seed: int) -> None:
    """Drafts of right, random and poisoned tokens, and stop tokens."""
    draw = random.Random(seed)
    # The model copies, so that some of these are sampled; in half of the cases one is poison.
    prompt = (healthy_tokens(12, seed) * 4)[: draw.randint(20, 48)]
    bias = {POISON[0]: 12.0} if draw.random() < 0.5 else {}
    sampling = dataclasses.replace(
        SAMPLINGS[sampling_name], logit_bias=dict.fromkeys(prompt[:12], 11.0) | bias
    )
    stops = frozenset({prompt[3]}) if draw.random() < 0.5 else frozenset()
    session = running.session

    def run(is_hinted: bool) -> tuple[type, list[int], list[int], list[float]]:
        sequence_id = session.open(
            prompt,
            sampling=sampling,
            stop_token_ids=stops,
            max_new_tokens=40,
            draft_wait=DraftWait.ALWAYS,
            cache_salt=str(is_hinted),
        )
        while not any(map(is_terminal, session.of(sequence_id))):
            session.read()
            known = session.output(sequence_id)
            hint = []
            if is_hinted:
                hint = plain[1][len(known) :][: draw.randint(0, 7)]
                for _ in range(draw.randint(0, 3)):
                    place = draw.randint(0, len(hint))
                    hint.insert(place, draw.choice([*POISON, draw.randrange(VOCAB_SIZE)]))
            session.hint(sequence_id, len(prompt) + len(known), hint)
        logprobs = [each for event in session.decided(sequence_id) for each in event.logprobs]
        end = session.wait_end(sequence_id)
        return (
            type(end),
            session.output(sequence_id),
            [each.token_id for each in logprobs],
            [each.logprob for each in logprobs],
        )

    plain = run(is_hinted=False)
    for _ in range(2):
        assert run(is_hinted=True) == plain


@pytest.mark.stand_in
def test_a_failing_stop_token_ends_well_and_its_block_is_not_cached(
    start_engine: StartEngine,
) -> None:
    text = [0, 1, 2, 7, 3, 3, 3, 3, 3]
    running = start_engine(rule=lambda known: text[len(known)], poison=frozenset({7}))
    session = running.attach()
    sequence_id = session.open(
        [0], max_new_tokens=7, draft_wait=DraftWait.ALWAYS, stop_token_ids=frozenset({7})
    )
    session.wait_decided(sequence_id, 1)
    session.hint(sequence_id, 2, [2, 7, 3])
    assert isinstance(session.wait_end(sequence_id), Decided)
    assert session.output(sequence_id) == [1, 2, 7]
    again = session.open([0, 1, 2, 7, 1], max_new_tokens=1)
    assert_rejected(session.wait_end(again))
