"""GGUF files as folders of documents, and broken ones."""

import json
import random
from pathlib import Path

import gguf
import pytest
import tokenizers

from servicekit.gguf.folder import model_folder
from servicekit.gguf.header import GgufError, read_header
from tests.servicekit.gguf_files import END, HIDDEN, TOKENS, TOOL, VOCABULARY, write_model


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small-Q4_1.gguf", "Q4_1")


def test_header_is_what_the_gguf_package_reads(file: Path) -> None:
    ours, theirs = read_header(file), gguf.GGUFReader(file)
    assert ours.metadata["tokenizer.ggml.tokens"] == TOKENS
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.dtype == tensor.tensor_type.name
        assert list(own.shape) == list(reversed(tensor.shape.tolist()))
        assert (own.start, own.end - own.start) == (tensor.data_offset, tensor.n_bytes)
    assert len(ours.tensors) == len(theirs.tensors)


def test_folder_holds_what_transformers_would_have_saved(file: Path) -> None:
    folder = model_folder(file)
    assert folder.name == "small-Q4_1"
    config = json.loads((folder / "config.json").read_bytes())
    assert (config["model_type"], config["hidden_size"]) == ("llama", HIDDEN)
    assert (config["vocab_size"], config["eos_token_id"]) == (VOCABULARY, [END])
    assert config["tie_word_embeddings"] is True
    assert (folder / file.name).resolve() == file.resolve()
    assert model_folder(file) == folder
    assert model_folder(file.parent) == folder


def test_another_file_of_the_same_name_is_another_folder(file: Path) -> None:
    before = model_folder(file)
    write_model(file, "Q8_0")
    assert model_folder(file) != before


def test_a_folder_that_lost_a_file_is_made_anew(file: Path) -> None:
    folder = model_folder(file)
    for name in ("tokenizer.json", file.name):
        (folder / name).unlink()
        assert model_folder(file) == folder
        assert (folder / name).exists()


def test_a_folder_with_documents_is_itself(file: Path) -> None:
    (file.parent / "config.json").write_text("{}")
    assert model_folder(file.parent) == file.parent


def test_tokens_are_cut_out_and_special_ones_known(file: Path) -> None:
    folder = model_folder(file)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("in the<|tool|><|end|>").ids
    assert [TOKENS[token] for token in ids] == ["in", "Ġthe", "<|tool|>", "<|end|>"]
    special = {
        token: added.special for token, added in tokenizer.get_added_tokens_decoder().items()
    }
    assert special == {END: True, TOOL: False}


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "  7", ["ĠĠ", "7"]),
        ("gpt-2", "  7", ["Ġ", "Ġ7"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("qwen2", "12", ["1", "2"]),
    ],
)
def test_words_are_split_as_the_metadata_names(
    tmp_path: Path, pre: str, text: str, expected: list[str]
) -> None:
    path = write_model(tmp_path / "a.gguf", "Q8_0", metadata={"tokenizer.ggml.pre": pre})
    tokenizer = tokenizers.Tokenizer.from_file(str(model_folder(path) / "tokenizer.json"))
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [word for word, _ in words] == expected


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre: unheard-of"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model: llama"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type: yarn"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window"),
        ({"general.architecture": "mamba"}, "general.architecture: mamba"),
        ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count: a list"),
        ({"tokenizer.ggml.eos_token_id": [1, 2]}, "tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.eot_token_id": "end"}, "tokenizer.ggml.eot_token_id: end"),
        ({"tokenizer.ggml.token_type": "normal"}, "tokenizer.ggml.token_type"),
    ],
)
def test_what_is_not_known_is_refused_by_its_key(
    tmp_path: Path, metadata: dict[str, str | int | list[int]], named: str
) -> None:
    path = write_model(tmp_path / "a.gguf", "Q8_0", metadata=metadata)
    with pytest.raises(GgufError, match=named):
        model_folder(path)


def test_two_models_in_a_folder_are_refused(file: Path) -> None:
    write_model(file.with_name("other.gguf"), "Q8_0")
    with pytest.raises(GgufError, match="holds several models"):
        model_folder(file.parent)


def test_a_missing_part_is_named(file: Path) -> None:
    first = file.with_name("a-00001-of-00002.gguf")
    file.rename(first)
    with pytest.raises(GgufError, match="a-00002-of-00002"):
        model_folder(first)


def test_broken_files_raise_one_line_that_names_the_file(file: Path) -> None:
    """Changed bytes, and ends cut off, anywhere in the header."""
    whole = file.read_bytes()
    end = min(tensor.start for tensor in read_header(file).tensors.values())
    draw = random.Random(7)
    broken, refusals = file.with_name("broken.gguf"), list[str]()
    for trial in range(400):
        content = bytearray(whole)
        if trial % 4 == 0:
            del content[draw.randrange(len(content)) :]
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(min(end, len(content)) or 1)
            content[place : place + 1] = draw.randbytes(1)
            if draw.random() < 0.3:
                content[place : place + 8] = draw.choice([b"\xff" * 8, b"\0" * 8])
        broken.write_bytes(content)
        try:
            model_folder(broken)
        except GgufError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert all(str(broken) in each and "\n" not in each for each in refusals)
