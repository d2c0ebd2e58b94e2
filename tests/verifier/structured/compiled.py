"""Compiled grammars of the bundled model's tokenizer, and the tokens that they allow."""

from pathlib import Path

import numpy as np

from verifier.structured.grammar import Grammar
from verifier.structured.grammar_state import GrammarState
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind

TOKENIZER = Path(__file__).parents[3] / "examples" / "demo_model" / "model" / "tokenizer.json"


VOCABULARY = 2048


END = 0


def state_of(grammars: Grammars, kind: GrammarKind, text: str) -> GrammarState:
    return grammars.compile(Grammar(kind, text, "field")).result(timeout=60)


def tokens_of(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
