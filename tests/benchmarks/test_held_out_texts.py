"""The held-out texts for drafting policies: their lengths, and notes on missing kinds."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.debian_copyrights import base_system_copyrights
from benchmarks.held_out_texts import CONTINUED_TOKENS, KNOWN_TOKENS, MAX_TEXTS, held_out_texts
from benchmarks.workloads import BUNDLED_MODEL


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))


def test_every_kind_has_texts_of_the_right_lengths_or_a_note(tokenizer: Tokenizer) -> None:
    texts, notes = held_out_texts(tokenizer)
    assert ("copyrights" in texts) == bool(base_system_copyrights())
    for kind, most_texts in MAX_TEXTS.items():
        if kind not in texts:
            assert any(note.startswith(f"{kind}:") for note in notes)
            continue
        assert 0 < len(texts[kind]) <= most_texts
        for text in texts[kind]:
            assert kind == "renames" or (
                len(text.known_token_ids) == KNOWN_TOKENS
                and len(text.coming_token_ids) == CONTINUED_TOKENS
            )


def test_a_system_without_dpkg_gets_a_note_instead_of_copyrights(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other kinds take seconds to tokenise.
    monkeypatch.setattr("benchmarks.held_out_texts._source_texts", list)
    monkeypatch.setattr("benchmarks.held_out_texts._package_texts", lambda: ({}, []))
    texts, notes = held_out_texts(tokenizer, debian=tmp_path)
    assert "copyrights" not in texts
    assert any(note.startswith("copyrights:") for note in notes)
