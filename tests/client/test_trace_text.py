"""The text of a trace and a summary. A test holds docs/data_flow.md to the golden trace's text."""

from tandem.client import DraftSource, ProposalTrace, StepTrace
from tandem.trace_text import TraceText


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
