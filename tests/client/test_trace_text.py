"""The text of a trace and a summary. A test holds docs/data_flow.md to the golden trace's text."""

from dataclasses import replace

from tandem.client import DraftSource, ProposalTrace, StepTrace, Usage
from tandem.trace_text import TraceText, summary_text
from tests import golden_trace


def lines_of(text: str) -> dict[str, str]:
    """The values by their names; names have no two blanks in a row."""
    lines = [line.strip().partition("  ") for line in text.splitlines()]
    return {name: value.strip() for name, _, value in lines}


def test_long_lists_are_cut_in_the_middle_and_the_unknown_is_marked() -> None:
    step = StepTrace(
        step_id=1,
        num_computed_tokens=16,
        num_scheduled_tokens=100,
        input_token_ids=tuple(range(500, 600)),
        positions=tuple(range(16, 116)),
        slot_mapping=tuple(range(16, 116)),
        logits_indices=(),
        draft_token_ids=(),
        num_accepted_tokens=0,
        output_token_ids=(),
        context_length_after=300,
        proposals=(
            ProposalTrace(
                base_length=17,
                token_ids=(1, 2),
                matched_ngram_length=2,
                source=DraftSource.POOL,
            ),
        ),
    )
    lines = lines_of(TraceText().step(step))
    assert lines["positions"] == "16 17 18 19 20 21 ... 88 more ... 110 111 112 113 114 115"
    assert lines["logits"] == "-"
    assert lines["proposal"] == "1 2: for 17 tokens, they followed ? 500 in the pool"
    assert "followed 7 500 in" in TraceText([7] * 17).step(step)


def test_the_summary_has_every_number() -> None:
    assert lines_of(summary_text(golden_trace.usage())) == {
        "requests": "1",
        "prompt tokens": "11",
        "cached tokens": "0",
        "output tokens": "21",
        "model steps": "13",
        "steps with drafts": "7",
        "steps without drafts": "6",
        "drafted tokens": "14",
        "accepted tokens": "8",
        "acceptance rate": "0.57",
        "mean acceptance length": "2.14",
        "maximum acceptance length": "3",
        "acceptance per position": "0.57 0.57",
        "accepted by match length": "2: 4/8, 3: 2/2, 5: 2/4",
        "drafts of its own text": "7",
        "drafts of a pool": "0",
    }


def test_without_drafts_the_summary_has_no_rates() -> None:
    plain = Usage(output_tokens=3, num_steps=3)
    assert plain.max_acceptance_length is None
    assert plain.acceptance_rate is None
    lines = lines_of(summary_text(plain))
    assert lines["steps without drafts"] == "3"
    assert "acceptance rate" not in lines
    rejected = replace(plain, num_drafts=1, num_draft_tokens=2, accepted_per_position=(0, 0))
    assert rejected.max_acceptance_length == 1
