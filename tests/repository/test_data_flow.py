"""docs/data_flow.md walks through the golden trace with its numbers."""

import re
from pathlib import Path

from tests.golden_trace import TRACE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data_flow.md"


def test_the_page_has_every_number_of_every_step() -> None:
    blocks = re.findall(r"```\n(step .*?)\n```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == len(TRACE["steps"]) == 13
    for block, step in zip(blocks, TRACE["steps"], strict=True):
        head, *lines = block.splitlines()
        assert head == (
            f"step {step['step']}: {step['num_computed_tokens']} tokens computed, "
            f"{step['num_scheduled_tokens']} scheduled"
        )
        values = dict(line.strip().split("  ", 1) for line in lines)
        for name, field in (
            ("input ids", "input_token_ids"),
            ("positions", "positions"),
            ("logits", "logits_indices"),
            ("draft", "draft_token_ids"),
            ("sampled", "output_token_ids"),
        ):
            numbers = [int(value) for value in values[name].split() if value != "-"]
            assert numbers == step[field], name
        num_drafts = len(step["draft_token_ids"])
        assert values["accepted"].strip() == f"{step['num_accepted_tokens']} of {num_drafts}"
        assert values["appended"].split()[-2] == str(step["context_length_after"])
