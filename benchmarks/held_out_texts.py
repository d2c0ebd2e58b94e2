"""Texts that the bundled model was not trained on, for a model that is made to say them.

source     modules of Python's standard library
documents  Python's help topics: prose that shares little but words
"""

import pydoc
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

NUM_TOKENS = 2300
MOST_TEXTS = 40


def held_out_texts(tokenizer: Tokenizer, kind: str) -> list[Sequence[int]]:
    """The token ids of up to `MOST_TEXTS` texts, `NUM_TOKENS` each."""
    texts = _SOURCES[kind]()
    found: list[Sequence[int]] = []
    for text in texts:
        ids = tokenizer.encode(text[:40_000], add_special_tokens=False).ids
        if len(ids) >= NUM_TOKENS:
            found.append(ids[:NUM_TOKENS])
        if len(found) == MOST_TEXTS:
            break
    return found


def _source() -> list[str]:
    # Spread over the folder, not the first by name.
    paths = sorted(Path(pydoc.__file__).parent.glob("*.py"))[::3]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def _documents() -> list[str]:
    return sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)


_SOURCES = {"source": _source, "documents": _documents}
