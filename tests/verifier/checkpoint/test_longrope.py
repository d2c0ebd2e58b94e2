"""longrope: a sequence's own limit decides its factors, and nothing else does.

The oracle is transformers, which decides by the longest text of a batch at each step: of texts that
it computes whole, and of models whose switch is moved so that it never changes its mind.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from servicekit.config import ServerOptions
from servicekit.gguf.folder import model_folder
from servicekit.gguf.header import GgufError
from tests.servicekit.gguf_files import HEADS, HIDDEN, write_model
from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import RunningDecoder, load, some_tokens
from tests.verifier.cpu.test_loader import save
from tests.verifier.gpu.graph_stand_in import RecordingCapture
from tests.verifier.gpu.running_decoder import RunningGpuDecoder
from tests.verifier.gpu.running_decoder import load as load_for_gpu
from tests.verifier.gpu.tables_attention import TablesBackend
from tests.verifier.running_engine import EngineSession, RecordingObserver
from verifier.build import build_engine, load_model
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.model_config import read_model_config
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.config import VerifierConfig
from verifier.cpu.numerics_digest import numerics_digest
from verifier.engine.messages import Opened
from verifier.gpu.decoder import Graphs
from verifier.gpu.graph_pool import GraphLimits
from verifier.parity.cpu_check import ParityCheck, Subject
from verifier.parity.reference import reference

SWITCH = 64
TEXT = some_tokens(100, 97)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose factors change after 64 tokens."""
    saved = tmp_path_factory.mktemp("saved")
    save(saved, "phi3_longrope_partial")
    return with_switch(saved, tmp_path_factory.mktemp("longrope"), SWITCH)


def with_switch(source: Path, folder: Path, switch: int, **parameters: Any) -> Path:
    """The model with another switch; its attention factor, which is told, stays.

    Args:
        parameters: further ones of the rotary embedding.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["original_max_position_embeddings"] = switch
    config["rope_parameters"] |= {"original_max_position_embeddings": switch, **parameters}
    file.write_text(json.dumps(config))
    return folder


def transformers_logits(folder: Path, text: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        output = model(input_ids=torch.tensor([text]), use_cache=False)
    logits: np.ndarray[Any, Any] = output.logits[0].numpy()
    return logits


@pytest.mark.parametrize("kind", ["cpu", "gpu", "gpu graphs"])
def test_short_and_long_sequences_of_a_step_have_their_own_factors(folder: Path, kind: str) -> None:
    """In transformers a long text of the batch changes the short one's logits."""
    capture, limits = RecordingCapture(), GraphLimits(buckets=(144,), max_bytes=1, max_prepare_s=60)
    running: Any = (
        RunningDecoder(load(folder), num_threads=2)
        if kind == "cpu"
        else RunningGpuDecoder(
            load_for_gpu(folder),
            backend=TablesBackend(0.0) if kind == "gpu graphs" else None,
            graphs=Graphs(capture=capture, limits=limits),
        )
    )
    if kind == "gpu graphs":
        running.decoder.warm_up()
    short, blocks = TEXT[:40], [9, 3, 7]
    together = [
        Chunk(token_ids=TEXT, start=0, block_table=[8, 2, 6, 4, 0, 1, 5], num_rows=100,
              uses_long_rope=True),
        Chunk(token_ids=short, start=0, block_table=blocks, num_rows=40),
    ]  # fmt: skip
    of_long, of_short = (np.asarray(rows) for rows in running.run(*together))
    for own, text in ((of_long, TEXT), (of_short, short)):
        expected = transformers_logits(folder, text)
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    # In transformers it would be padded to the long one's length.
    padded = transformers_logits(folder, [*short, *[0] * 60])[:40]
    assert np.abs(padded - of_short).max() > 0.1
    assert np.abs(of_long[:40] - of_short).max() > 0.1
    assert (capture.num_replays > 0) == (kind == "gpu graphs")
    if kind == "cpu":
        (alone,) = running.run(together[1])
        np.testing.assert_array_equal(alone, of_short)
        running.decoder.close()


@pytest.fixture
def session(folder: Path) -> Iterator[EngineSession]:
    config = VerifierConfig(
        server=ServerOptions(listen="127.0.0.1:0"),
        model=folder,
        device="cpu",
        threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        num_kv_blocks=64,
    )
    engine = build_engine(load_model(config), config, [RecordingObserver()])
    engine.start()
    opened = EngineSession(engine)
    yield opened
    opened.detach()
    engine.when_idle().result(60)
    engine.stop()
    engine.stopped.result(60)


def output_of(session: EngineSession, prompt: list[int], count: int) -> list[int]:
    sequence_id = session.open(prompt, max_new_tokens=count, num_speculative_tokens=0)
    session.wait_end(sequence_id)
    return session.output(sequence_id)


def test_greedy_output_is_that_of_a_model_that_never_changes_its_factors(
    folder: Path, tmp_path: Path, session: EngineSession
) -> None:
    """A limit of 64 tokens is a short sequence's, one of 65 a long one's."""
    always_long = with_switch(folder, tmp_path, 2)
    for count, model_of in ((SWITCH - 40, folder), (SWITCH - 39, always_long), (60, always_long)):
        output = output_of(session, TEXT[:40], count)
        assert len(output) == count
        expected = transformers_logits(model_of, TEXT[:40] + output[:-1])[39:]
        behind = expected.max(axis=1) - expected[np.arange(count), output]
        assert behind.max() < 1e-4 * np.abs(expected).max()


def test_cached_prefixes_are_shared_by_sequences_of_equal_factors_alone(
    session: EngineSession,
) -> None:
    prompt, counts = TEXT[:50], (10, 10, 30, 30)
    outputs = [output_of(session, prompt, count) for count in counts]
    cached = [event.num_cached_tokens for event in session.events if isinstance(event, Opened)]
    assert cached == [0, 48, 0, 48]
    assert outputs[0] == outputs[1] != outputs[2][:10]
    assert outputs[2] == outputs[3]
    # Of a whole text that ends before the switch, too.
    assert output_of(session, prompt, 14)[:10] == outputs[0]


def test_digests_differ_where_a_limit_makes_every_sequence_short(folder: Path) -> None:
    weights = load(folder)
    digests = [numerics_digest(weights, max_model_len=length) for length in (40, 64, 65, 512)]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def test_the_check_at_load_covers_both_kinds_of_factors(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load(folder)
    (rotary,) = weights.rotaries
    assert rotary.long_inv_freq is not None
    exact, _ = reference(folder, dtype=torch.float32, quantization="none", rounds_kv=True)
    subject = Subject(
        folder=folder, model_digest="", dtype="float32", quantization="none",
        max_position_embeddings=512,
    )  # fmt: skip
    with ParityCheck(subject, cache=tmp_path, num_threads=1) as check:
        monkeypatch.setattr(check, "_reference", lambda **_: (exact.numpy(), 0.0))
        other = np.float32(1.01)
        for wrong in (
            dataclasses.replace(rotary, inv_freq=rotary.inv_freq * other),
            dataclasses.replace(rotary, long_inv_freq=rotary.long_inv_freq * other),
        ):
            with pytest.raises(CheckpointError, match="logits differ by"):
                check.verify(dataclasses.replace(weights, rotaries=[wrong]))
        check.verify(weights)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"long_factor": [1.0] * 7}, "long_factor is not 8 factors"),
        ({"short_factor": [1.0] * 7 + [0.0]}, "short_factor is not 8 factors"),
        ({"short_factor": None}, "short_factor"),
        ({"long_mscale": 1.1}, "long_mscale"),
        ({"rope_type": "yarn"}, "of type yarn"),
    ],
)
def test_odd_factors_are_refused_by_name(
    folder: Path, tmp_path: Path, parameters: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotServedError, match=reason):
        read_model_config(with_switch(folder, tmp_path, SWITCH, **parameters))


def test_the_first_name_and_what_phi_4_mini_tells_beside_it_are_known(
    folder: Path, tmp_path: Path
) -> None:
    file = with_switch(folder, tmp_path, SWITCH) / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    factors = {key: rope[key] for key in ("short_factor", "long_factor", "attention_factor")}
    config |= {
        "rope_scaling": {"type": "su", **factors},
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    }
    file.write_text(json.dumps(config))
    ours, theirs = (read_model_config(each).rotaries[0] for each in (tmp_path, folder))
    np.testing.assert_equal(dataclasses.asdict(ours), dataclasses.asdict(theirs))
    file.write_text(json.dumps({**config, "full_attn_mod": 2}))
    with pytest.raises(NotServedError, match="full_attn_mod"):
        read_model_config(tmp_path)


def write_gguf(path: Path, architecture: str, factors: dict[str, int]) -> Path:
    rotated = HIDDEN // HEADS // 2
    tensors = {
        f"rope_factors_{name}.weight": np.linspace(1, last, rotated // 2, dtype=np.float32)
        for name, last in factors.items()
    }
    return write_model(
        path / "long.gguf",
        "Q8_0",
        architecture=architecture,
        metadata={
            f"{architecture}.rope.dimension_count": rotated,
            f"{architecture}.rope.scaling.original_context_length": 128,
            f"{architecture}.rope.scaling.attn_factor": 1.5,
        },
        vectors=tensors,
    )


def test_a_gguf_file_tells_the_same_model(tmp_path: Path) -> None:
    folder = model_folder(write_gguf(tmp_path, "phi3", {"short": 2, "long": 40}))
    described = describe_decoder(folder)
    (rotary,) = described.config.rotaries
    assert (rotary.max_short_tokens, rotary.scaling) == (128, 1.5)
    assert rotary.long_inv_freq is not None
    powers = 10_000.0 ** (np.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(rotary.inv_freq * powers, 1 / np.linspace(1, 2, 16), rtol=1e-6)
    np.testing.assert_allclose(rotary.long_inv_freq * powers, 1 / np.linspace(1, 40, 16), rtol=1e-6)
    # transformers reads the documents, both kinds of factors included.
    exact, _ = reference(folder, dtype=torch.float32, quantization="none")
    with RunningDecoder(load(folder, "float32")) as running:
        text = [(37 * i + 11) % running.weights.vocab_size for i in range(48)]
        chunks = [
            Chunk(token_ids=text, start=0, block_table=[i, i + 1, i + 2], num_rows=48,
                  uses_long_rope=i > 0)
            for i in (0, 3)
        ]  # fmt: skip
        rows = np.concatenate(running.run(*chunks))
    np.testing.assert_allclose(rows, exact.numpy(), rtol=0, atol=2e-3 * np.abs(exact.numpy()).max())


def test_factors_of_a_gguf_file_that_have_no_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"rope_factors_long\.weight: is not served with llama"):
        model_folder(write_gguf(tmp_path, "llama", {"long": 4}))
    with pytest.raises(NotServedError, match="short_factor"):
        describe_decoder(model_folder(write_gguf(tmp_path, "phi3", {"long": 4})))
