"""The model's tokenizer as the grammar library is to see it.

The library writes text that must come as the tokenizer would, and then walks its grammar by the
bytes of these tokens. So a text must not become a token that the library takes for something else
than that text, nor another text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# What the library takes for special, whatever the tokenizer says.
_TAG = re.compile(r"<.*>", re.DOTALL)
# They compose characters: a text whose characters are not composed would become another one.
_COMPOSING = ("NFC", "NFKC")


class LibraryTokenizer(NamedTuple):
    """A tokenizer.json for the library.

    Attributes:
        text: of the file.
        tags: the ids of tokens that have no name there any more, by their content. A grammar in
            Lark may refer to `<name>`; the library knows it as `<[id]>`.
    """

    text: str
    tags: Mapping[str, int]


def library_tokenizer(text: str) -> LibraryTokenizer:
    """Changes a tokenizer.json: tokens that the library takes for special get names that no text
    has, characters are not composed, and no text gets a space before it.

    Raises:
        ValueError: it is no JSON.
        Exception: it is no tokenizer of this kind.
    """
    tokenizer: dict[str, Any] = json.loads(text)
    tags: dict[str, int] = {}
    for token in tokenizer.get("added_tokens") or ():
        content = token["content"]
        if not token["special"] and not _TAG.fullmatch(content):
            continue
        tags[content] = token["id"]
        token["content"] = _name(token["id"])
        token["special"] = True

    def named(content: str) -> str:
        return _name(tags[content]) if content in tags else content

    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {named(content): i for content, i in model["vocab"].items()}
    else:
        # Of Unigram, in the order of ids.
        model["vocab"] = [[named(content), score] for content, score in model["vocab"]]
    tokenizer["normalizer"] = _without_composing(tokenizer.get("normalizer"))
    tokenizer["pre_tokenizer"] = _without_added_space(tokenizer.get("pre_tokenizer"))
    return LibraryTokenizer(json.dumps(tokenizer), tags)


def _name(token_id: int) -> str:
    return f"<\U0010fffd{token_id}>"


def _without_composing(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if normalizer is None or normalizer["type"] in _COMPOSING:
        return None
    if normalizer["type"] == "Sequence":
        parts = [_without_composing(each) for each in normalizer["normalizers"]]
        return normalizer | {"normalizers": [each for each in parts if each is not None]}
    return normalizer


def _without_added_space(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "Sequence":
        parts = [_without_added_space(each) for each in pre_tokenizer["pretokenizers"]]
        return pre_tokenizer | {"pretokenizers": parts}
    if pre_tokenizer["type"] == "ByteLevel":
        return pre_tokenizer | {"add_prefix_space": False}
    return pre_tokenizer
