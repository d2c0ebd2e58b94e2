"""The presets agree with docs/drafting.md and the wire; overrides change single values."""

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.requests.drafting_policy import POLICIES, TANDEM, DraftingPolicy
from tandem.v1 import sampling_pb2
from tandem.values import SpeculationParams

DOCUMENT = (Path(__file__).parents[3] / "docs" / "drafting.md").read_text()


def override(policy: DraftingPolicy, **values: Any) -> DraftingPolicy:
    return policy.override(SpeculationParams(**values))


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 3}, (2, 3)),
    ],
)
def test_an_override_of_one_mirrored_ngram_size_sets_both(
    overrides: dict[str, int], sizes: tuple[int, int]
) -> None:
    policy = override(POLICIES["vllm-kmp"], **overrides)
    assert (policy.min_ngram, policy.max_ngram) == sizes


def test_an_override_to_the_longest_match_follows_the_match_as_tandem_does() -> None:
    policy = override(POLICIES["vllm"], tie="longest")
    assert policy.tokens_per_match == TANDEM.tokens_per_match > 0
    assert override(policy, tie="latest").tokens_per_match == 0


def test_the_document_describes_every_preset() -> None:
    rows = re.findall(r"^\| `([a-z-]+)`.* \| (\d)\.\.(\d) \| (\w+) \| (\w+)[^|]* \| (\w+) \| "
                      r"([^|]+) \| ([^|]+) \|$", DOCUMENT, re.MULTILINE)  # fmt: skip
    assert len(rows) == len(POLICIES)
    for name, shortest, longest, overlap, tie, algorithm, drafts, asked in rows:
        policy = POLICIES[name]
        assert (policy.min_ngram, policy.max_ngram) == (int(shortest), int(longest))
        assert policy.overlap == overlap
        assert policy.tie == tie
        assert policy.algorithm == algorithm.lower()
        assert policy.runs_ahead == (asked != "one step's")
        assert policy.follows_match == (not drafts.isdigit())
        if drafts.isdigit():
            assert policy.num_speculative_tokens_within(31) == int(drafts)


def test_the_document_names_every_option() -> None:
    fields = sampling_pb2.SpeculationParams.DESCRIPTOR.fields
    assert [field.name for field in fields if f"`{field.name}`" not in DOCUMENT] == []
