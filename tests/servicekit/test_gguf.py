"""GGUF files as folders of documents, and broken ones."""

import itertools
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from servicekit.gguf.folder import model_folder
from servicekit.gguf.header import GgufError, read_header
from tests.servicekit.gguf_files import (
    END,
    HEADS,
    HIDDEN,
    TOKENS,
    TOOL,
    VOCABULARY,
    write_model,
)


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


def test_a_tokenizer_needs_the_header_and_the_size_alone(file: Path, tmp_path: Path) -> None:
    """So gateways get no weights (docs/deploy.md)."""
    num_header_bytes = min(tensor.start for tensor in read_header(file).tensors.values())
    beginning = tmp_path / "beginning.gguf"
    beginning.write_bytes(file.read_bytes()[:num_header_bytes])
    os.truncate(beginning, file.stat().st_size)
    whole, part = (model_folder(each) / "tokenizer.json" for each in (file, beginning))
    assert whole != part
    assert whole.read_bytes() == part.read_bytes()


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
        ("qwen2", "x\u0331y", ["x", "Ì±y"]),
        ("qwen35", "x\u0331y12", ["xÌ±y", "1", "2"]),
        ("dbrx", "it's I'LL", ["it", "'s", "ĠI", "'LL"]),
        ("gpt-4o", "XMLHttp it's/", ["XMLHttp", "Ġit's", "/"]),
        ("tekken", "XMLHttp it's", ["XMLHttp", "Ġit", "'s"]),
        ("deepseek-coder", "a, 12\n", ["a", ",", "Ġ", "1", "2", "Ċ"]),
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
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model: bert"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type: longrope"),
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


_SENTENCEPIECE = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
_PIECES = ["▁", *"abc", "▁a", "ab", "bc", "abc", "▁ab", "▁▁", "ca", "ac", "aa", "bb", "cab"]
# Of a file: control tokens, bytes, normal ones by falling score, one that is cut out.
_PIECE_KINDS = [2, 3, 3, *[6] * 256, *[1] * len(_PIECES), 4]


def _sentencepiece(path: Path, **metadata: Any) -> tuple[tokenizers.Tokenizer, list[str]]:
    written = _sentencepiece_metadata(**metadata)
    folder = model_folder(write_model(path / "a.gguf", "Q8_0", metadata=written))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer, written["tokenizer.ggml.tokens"]


def _sentencepiece_metadata(**metadata: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*_SENTENCEPIECE, *_PIECES, "  "],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(_PIECES))] + [0.0],
        "tokenizer.ggml.token_type": _PIECE_KINDS,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in metadata.items()},
    }


def _best_merged(text: str) -> list[str]:
    """Of all neighbours, those that make the best piece are merged, the first of equals."""
    parts = list(text.replace(" ", "▁"))
    while True:
        made = [left + right for left, right in itertools.pairwise(parts)]
        ranks = [_PIECES.index(each) if each in _PIECES else len(_PIECES) for each in made]
        if not ranks or min(ranks) == len(_PIECES):
            break
        at = ranks.index(min(ranks))
        parts[at : at + 2] = [made[at]]
    return [
        byte
        for part in parts
        for byte in ([part] if part in _PIECES else [f"<0x{b:02X}>" for b in part.encode()])
    ]


def test_sentencepiece_merges_the_best_piece_first(tmp_path: Path) -> None:
    tokenizer, tokens = _sentencepiece(tmp_path, add_space_prefix=False)
    draw = random.Random(11)
    for _ in range(2000):
        text = "".join(draw.choices("abc é", k=draw.randrange(1, 24)))
        # Two spaces are a token of their own, which is cut out first.
        expected = [
            part
            for piece in re.split("(  )", text)
            for part in ([piece] if piece == "  " else _best_merged(piece))
        ]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert [tokens[token] for token in ids] == expected, text
        assert tokenizer.decode(ids) == text


def test_sentencepiece_has_a_space_before_text_unless_the_file_says_not(tmp_path: Path) -> None:
    tokenizer, tokens = _sentencepiece(tmp_path)
    ids = tokenizer.encode("ab</s>ab  ab", add_special_tokens=False).ids
    assert [tokens[token] for token in ids] == ["▁ab", "</s>", "▁ab", "  ", "▁ab"]
    assert tokenizer.decode([tokens.index("▁ab")]) == "ab"


def test_merges_are_in_the_order_that_a_file_tells(tmp_path: Path) -> None:
    tokenizer, tokens = _sentencepiece(
        tmp_path, model="gemma4", add_space_prefix=False, merges=["b c", "a b", "▁ a"]
    )
    ids = tokenizer.encode("abc ab\né", add_special_tokens=False).ids
    # By the scores, it would begin with "abc", and then have "▁ab".
    expected = ["a", "bc", "▁", "ab", "<0x0A>", "<0xC3>", "<0xA9>"]
    assert [tokens[token] for token in ids] == expected
    assert tokenizer.decode(ids) == "abc ab\né"


def test_the_unknown_token_is_a_special_one(tmp_path: Path) -> None:
    tokenizer, tokens = _sentencepiece(tmp_path, add_space_prefix=False)
    ids = tokenizer.encode("a<unk>b", add_special_tokens=False).ids
    assert [tokens[token] for token in ids] == ["a", "<unk>", "b"]
    assert tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize(("architecture", "kept"), [("phi3", ["a"]), ("llama", ["▁a"])])
def test_added_tokens_of_phi3_take_the_spaces_after_them(
    tmp_path: Path, architecture: str, kept: list[str]
) -> None:
    metadata = _sentencepiece_metadata(add_space_prefix=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    path = write_model(tmp_path / "a.gguf", "Q8_0", architecture=architecture, metadata=metadata)
    tokenizer = tokenizers.Tokenizer.from_file(str(model_folder(path) / "tokenizer.json"))
    ids = tokenizer.encode("</s> a<s> a", add_special_tokens=False).ids
    assert [tokens[token] for token in ids] == ["</s>", *kept, "<s>", "▁a"]


def test_a_token_that_is_too_long_to_be_cut_everywhere_is_refused(tmp_path: Path) -> None:
    metadata = _sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"][-2] = "a" * 1_000_000
    path = write_model(tmp_path / "a.gguf", "Q8_0", metadata=metadata)
    with pytest.raises(GgufError, match="has one of 1000000 characters"):
        model_folder(path)


def test_configurations_say_what_their_family_computes(tmp_path: Path) -> None:
    def config(architecture: str, num_experts: int = 0, **metadata: int | str) -> dict[str, Any]:
        told = {f"{architecture}.{key.replace('__', '.')}": metadata[key] for key in metadata}
        path = write_model(tmp_path / f"{architecture}.gguf", "Q8_0", architecture=architecture,
                           num_experts=num_experts, metadata=told)  # fmt: skip
        content: dict[str, Any] = json.loads((model_folder(path) / "config.json").read_bytes())
        return content

    gemma = config("gemma3", rope__scaling__type="linear", rope__scaling__factor=8)
    assert (gemma["model_type"], gemma["dtype"]) == ("gemma3_text", "bfloat16")
    assert (gemma["sliding_window"], gemma["query_pre_attn_scalar"]) == (16, HIDDEN // 4)
    assert gemma["rope_scaling"] == {"rope_type": "linear", "factor": 8}
    # The largest one divides by what its heads would have, were they not wider.
    gemma = config("gemma3", block_count=62, attention__key_length=128, attention__value_length=128)
    assert (gemma["head_dim"], gemma["query_pre_attn_scalar"]) == (128, HIDDEN // 4)
    phi = config("phi3", attention__sliding_window=0)
    assert (phi["architectures"], phi["sliding_window"]) == (["Phi3ForCausalLM"], None)
    mixtral = config("llama", num_experts=4)
    assert (mixtral["model_type"], mixtral["num_local_experts"]) == ("mixtral", 4)
    assert mixtral["num_experts_per_tok"] == 2
    yarn = config("qwen2", rope__scaling__type="yarn", rope__scaling__factor=4,
                  rope__scaling__original_context_length=128)  # fmt: skip
    assert yarn["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128,
    }  # fmt: skip


def test_granites_factors_are_told_and_scores_have_one_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(name: str) -> dict[str, Any]:
        path = write_model(tmp_path / name / "a.gguf", "Q8_0", architecture="granite")
        content: dict[str, Any] = json.loads((model_folder(path) / "config.json").read_bytes())
        return content

    told = config("told")
    keys = ("attention", "embedding", "residual")
    factors = [told["logits_scaling"], *(told[f"{key}_multiplier"] for key in keys)]
    assert factors == pytest.approx([6.0, 0.21, 3.0, 0.22])
    monkeypatch.setattr(gguf.GGUFWriter, "add_attention_scale", lambda self, scale: None)
    assert config("untold")["attention_multiplier"] == (HIDDEN // HEADS) ** -0.5


def test_two_models_in_a_folder_are_refused(file: Path) -> None:
    write_model(file.with_name("other.gguf"), "Q8_0")
    with pytest.raises(GgufError, match="holds several models"):
        model_folder(file.parent)


def test_a_missing_part_is_named(file: Path) -> None:
    first = file.with_name("a-00001-of-00002.gguf")
    file.rename(first)
    with pytest.raises(GgufError, match="a-00002-of-00002"):
        model_folder(first)


@pytest.mark.parametrize("is_sentencepiece", [False, True])
def test_broken_files_raise_one_line_that_names_the_file(
    tmp_path: Path, is_sentencepiece: bool
) -> None:
    """Changed bytes, and ends cut off, anywhere in the header."""
    metadata = _sentencepiece_metadata() if is_sentencepiece else None
    file = write_model(tmp_path / "whole.gguf", "Q4_1", metadata=metadata)
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
