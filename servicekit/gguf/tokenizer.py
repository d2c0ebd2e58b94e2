"""A GGUF file's vocabulary as a tokenizer.json of the `tokenizers` package.

What splits a text into words is told by a name alone, `tokenizer.ggml.pre`: its rules are those of
the models that the name is of.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from servicekit.gguf.header import GgufError, GgufHeader

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(uses_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": uses_regex,
    }


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return [{**split, "invert": False}, _byte_level(False)]


_PRE_TOKENIZERS: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}
# Whose words may be tokens of the vocabulary that no merges lead to.
_IGNORING_MERGES = ("llama-bpe",)
_COMPOSING = ("qwen2",)


def tokenizer_of(header: GgufHeader) -> dict[str, Any]:
    """The content of a tokenizer.json.

    Raises:
        GgufError: the vocabulary is of another kind, or incomplete; the message names the key.
    """
    metadata, path = header.metadata, header.path
    kind, pre = (str(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
    if kind != "gpt2":
        raise GgufError(f"{path}: tokenizer.ggml.model: {kind} is not served")
    if pre not in _PRE_TOKENIZERS:
        raise GgufError(f"{path}: tokenizer.ggml.pre: {pre} is not served")
    tokens, merges = (_strings(header, f"tokenizer.ggml.{key}") for key in ("tokens", "merges"))
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise GgufError(f"{path}: tokenizer.ggml.token_type: is not as long as the vocabulary")
    vocabulary = {text: token for token, text in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise GgufError(f"{path}: tokenizer.ggml.tokens: a token is there twice")
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
                "rstrip": False,
                "normalized": False,
                "special": int(kinds[token]) == _CONTROL,
            }
            for token in range(len(tokens))
            if int(kinds[token]) in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre in _COMPOSING else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _IGNORING_MERGES,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def tokenizer_config_of(header: GgufHeader) -> dict[str, Any]:
    """The content of a tokenizer_config.json: special tokens by role, and the chat template."""
    metadata = header.metadata
    tokens = _strings(header, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, role in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < len(tokens):
            raise GgufError(f"{header.path}: tokenizer.ggml.{key}_token_id: {token} is no token")
        config[role] = tokens[token]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _strings(header: GgufHeader, key: str) -> list[str]:
    values = header.metadata.get(key)
    if not isinstance(values, list):
        raise GgufError(f"{header.path}: {key}: is missing, or no list of strings")
    return values
