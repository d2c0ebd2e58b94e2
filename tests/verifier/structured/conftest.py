"""Grammars of the bundled model's tokenizer."""

import pytest

from tests.verifier.structured.compiled import END, TOKENIZER, VOCABULARY
from verifier.structured.grammars import Grammars


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, vocab_size=VOCABULARY, end_token_ids=[END])
