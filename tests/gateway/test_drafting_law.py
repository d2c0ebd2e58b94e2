"""The presets, and what docs/drafting.md says of them."""

import re
from pathlib import Path

import pytest

from gateway.messages.request import Algorithm, Overlap, Tie
from gateway.requests.drafting_policy import LAWS, TANDEM, DraftingLaw, Preset
from tandem.v1 import sampling_pb2

DOCUMENT = (Path(__file__).parents[2] / "docs" / "drafting.md").read_text()

UNSAID = dict.fromkeys(
    (
        *("min_ngram", "max_ngram", "overlap", "tie", "tokens_per_match", "algorithm"),
        *("chained", "pool_min_ngram", "num_speculative_tokens"),
    )
)


def changed(law: DraftingLaw, **said: object) -> DraftingLaw:
    return law.changed(**{**UNSAID, **said})  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", LAWS)
def test_nothing_said_is_the_preset_itself(preset: Preset) -> None:
    assert changed(LAWS[preset]) == LAWS[preset]


@pytest.mark.parametrize(
    ("said", "sizes"),
    [
        ({"max_ngram": 3}, (3, 3)),
        ({"min_ngram": 2}, (2, 2)),
        ({"min_ngram": 2, "max_ngram": 3}, (2, 3)),
    ],
)
def test_a_law_of_one_size_mirrors_the_one_that_is_said(
    said: dict[str, int], sizes: tuple[int, int]
) -> None:
    law = changed(LAWS[Preset.VLLM_KMP], **said)
    assert (law.min_ngram, law.max_ngram) == sizes


def test_the_longest_match_said_of_another_law_follows_the_match_as_ours() -> None:
    law = changed(LAWS[Preset.VLLM], tie=Tie.LONGEST)
    assert law.tokens_per_match == TANDEM.tokens_per_match > 0
    assert changed(law, tie=Tie.LATEST).tokens_per_match == 0


def test_the_wire_has_the_same_presets() -> None:
    names = {
        name.removeprefix("PRESET_"): int(value) for name, value in sampling_pb2.Preset.items()
    }
    assert names.pop("UNSPECIFIED") == Preset.DEFAULT
    assert names == {preset.name: preset.value for preset in LAWS}


def test_the_document_says_what_each_preset_is() -> None:
    rows = re.findall(r"^\| `([a-z-]+)`.* \| (\d)\.\.(\d) \| (\w+) \| (\w+)[^|]* \| (\w+) \| "
                      r"([^|]+) \| ([^|]+) \|$", DOCUMENT, re.MULTILINE)  # fmt: skip
    assert len(rows) == len(LAWS)
    for name, shortest, longest, overlap, tie, algorithm, drafts, asked in rows:
        law = LAWS[Preset[name.replace("-", "_").upper()]]
        assert (law.min_ngram, law.max_ngram) == (int(shortest), int(longest))
        assert law.overlap is Overlap[overlap.upper()]
        assert law.tie is Tie[tie.upper()]
        assert law.algorithm is Algorithm[algorithm.upper()]
        assert law.runs_ahead == (asked != "one step's")
        assert law.follows_match == (not drafts.isdigit())
        if drafts.isdigit():
            assert law.most_drafts(31) == int(drafts)


def test_the_document_has_every_option() -> None:
    fields = sampling_pb2.SpeculationParams.DESCRIPTOR.fields
    assert [field.name for field in fields if f"`{field.name}`" not in DOCUMENT] == []
