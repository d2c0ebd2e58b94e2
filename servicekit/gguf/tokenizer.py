"""A GGUF file's vocabulary as a tokenizer.json of the `tokenizers` package.

Of a byte-level vocabulary ("gpt2"), what splits a text into words is told by a name alone,
`tokenizer.ggml.pre`: its rules are those of the models that the name is of. One of SentencePiece
has no words; the order of its merges is that of its tokens' scores ("llama"), or told ("gemma4").
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.gguf.header import GgufError, GgufHeader

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL = (_UNKNOWN, _CONTROL)
# What SentencePiece writes for a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Of a token that merges make, many times what SentencePiece learns. All its cuts are tried.
_LONGEST_PIECE = 256
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
# Words whose capitals are at their beginning.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITALISED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CAPITALISED.replace(_CONTRACTIONS + "?", "").replace(r"\p{N}{1,3}", r"\p{N}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\x{d7ff}]+", r"\p{N}")

_DIGITS = {"type": "Digits", "individual_digits": True}


def _byte_level(uses_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": uses_regex,
    }


def _split(*patterns: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return [*({**split, "pattern": {"Regex": each}} for each in patterns), _byte_level(False)]


_PRE_TOKENIZERS: Mapping[str, list[dict[str, Any]]] = {
    name: pre_tokenizers
    for names, pre_tokenizers in (
        ("gpt-2 phi-2 olmo", [_byte_level(True)]),
        ("smollm starcoder refact command-r codeshell", [_DIGITS, _byte_level(True)]),
        ("llama-bpe llama3 llama-v3 falcon3 pixtral dbrx smaug-bpe", _split(_LLAMA3)),
        ("qwen2 deepseek-r1-qwen stablelm2", _split(_QWEN2)),
        ("qwen35", _split(_QWEN35)),
        ("gpt-4o llama4", _split(_CAPITALISED)),
        ("tekken", _split(_TEKKEN)),
        ("deepseek-coder", _split(*_DEEPSEEK_CODER)),
    )
    for name in names.split()
}
# Whose words may be tokens of the vocabulary that no merges lead to.
_IGNORING_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
_COMPOSING = ("qwen2", "qwen35", "deepseek-r1-qwen")
# Added tokens of phi3 that do not take the spaces after them.
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_of(header: GgufHeader) -> dict[str, Any]:
    """The content of a tokenizer.json.

    Raises:
        GgufError: the vocabulary is of another kind, or incomplete; the message names the key.
    """
    metadata, path = header.metadata, header.path
    kind = str(metadata.get("tokenizer.ggml.model"))
    tokens = _strings(header, "tokenizer.ggml.tokens")
    kinds = _numbers(header, "tokenizer.ggml.token_type", len(tokens))
    if not tokens:
        raise GgufError(f"{path}: tokenizer.ggml.tokens: is empty")
    if len(set(tokens)) < len(tokens):
        raise GgufError(f"{path}: tokenizer.ggml.tokens: a token is there twice")
    if kind == "gpt2":
        parts, model = _byte_level_model(header)
    elif kind in ("llama", "gemma4"):
        parts, model = _sentencepiece_model(header, tokens, kinds)
    else:
        raise GgufError(f"{path}: tokenizer.ggml.model: {kind} is not served")
    # Whether added tokens take the spaces that follow them; a file has no place to say so.
    strips = metadata.get("general.architecture") == "phi3" and kind == "llama"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": tokens[token],
                "single_word": False,
                "lstrip": False,
                "rstrip": strips and tokens[token] not in _UNSTRIPPED,
                "normalized": False,
                "special": int(kinds[token]) in _SPECIAL,
            }
            for token in np.flatnonzero(np.isin(kinds, (*_SPECIAL, _USER_DEFINED))).tolist()
        ],
        "post_processor": None,
        **parts,
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "vocab": {text: token for token, text in enumerate(tokens)},
            **model,
        },
    }


def _byte_level_model(header: GgufHeader) -> tuple[dict[str, Any], dict[str, Any]]:
    """What such a tokenizer has beside its model, and the model without its vocabulary."""
    pre = str(header.metadata.get("tokenizer.ggml.pre"))
    if pre not in _PRE_TOKENIZERS:
        raise GgufError(f"{header.path}: tokenizer.ggml.pre: {pre} is not served")
    parts = {
        "normalizer": {"type": "NFC"} if pre in _COMPOSING else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "decoder": _byte_level(True),
    }
    return parts, {
        "unk_token": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre in _IGNORING_MERGES,
        "merges": _strings(header, "tokenizer.ggml.merges"),
    }


def _sentencepiece_model(
    header: GgufHeader, tokens: Sequence[str], kinds: npt.NDArray[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `_byte_level_model`."""
    metadata = header.metadata
    if metadata["tokenizer.ggml.model"] == "gemma4":
        merges: list[Any] = _strings(header, "tokenizer.ggml.merges")
    else:
        scores = _numbers(header, "tokenizer.ggml.scores", len(tokens)).astype(np.float64)
        merges = _merges_by_score(header.path, tokens, scores, kinds)
    unknown = _token(header, "unknown", tokens)
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []),
    ]
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }
    return parts, {
        "unk_token": tokens[0] if unknown is None else unknown,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "merges": merges,
    }


def _merges_by_score(
    path: Path, tokens: Sequence[str], scores: npt.NDArray[Any], kinds: npt.NDArray[Any]
) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best token's first.

    Tokens that are cut out of a text before are never made.
    """
    normal = np.flatnonzero(kinds == _NORMAL)
    known = {tokens[token] for token in normal.tolist()}
    longest = max(map(len, known), default=0)
    if longest > _LONGEST_PIECE:
        raise GgufError(f"{path}: tokenizer.ggml.tokens: has one of {longest} characters")
    return [
        (left, right)
        for token in normal[np.argsort(-scores[normal], kind="stable")].tolist()
        for text in (tokens[token],)
        for end in range(1, len(text))
        if (left := text[:end]) in known and (right := text[end:]) in known
    ]


def tokenizer_config_of(header: GgufHeader) -> dict[str, Any]:
    """The content of a tokenizer_config.json: special tokens by role, and the chat template."""
    metadata = header.metadata
    tokens = _strings(header, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, role in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        if (token := _token(header, key, tokens)) is not None:
            config[role] = token
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _strings(header: GgufHeader, key: str) -> list[str]:
    values = header.metadata.get(key)
    if not isinstance(values, list):
        raise GgufError(f"{header.path}: {key}: is missing, or no list of strings")
    return values


def _numbers(header: GgufHeader, key: str, count: int) -> npt.NDArray[Any]:
    values = header.metadata.get(key)
    if not isinstance(values, np.ndarray) or len(values) != count:
        raise GgufError(f"{header.path}: {key}: is not as long as the vocabulary")
    return values


def _token(header: GgufHeader, role: str, tokens: Sequence[str]) -> str | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token = header.metadata.get(key)
    if token is None:
        return None
    if type(token) is not int or not 0 <= token < len(tokens):
        raise GgufError(f"{header.path}: {key}: {token} is no token")
    return tokens[token]
