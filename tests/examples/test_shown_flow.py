"""How the examples show drafted, accepted and appended tokens."""

from dataclasses import replace

import pytest

from examples import demo, quickstart
from examples.demo_model.dataset import read_heldout
from tandem.client import Chunk, ReportedToken, Usage


def chunk(*tokens: tuple[str, bool], **fields: int) -> Chunk:
    """A chunk of these tokens: the text of each, and whether it was drafted and accepted."""
    made = Chunk(
        choice_index=0,
        offset=0,
        token_ids=tuple(range(len(tokens))),
        text="".join(text for text, _ in tokens),
        num_draft_tokens=0,
        num_accepted_tokens=sum(accepted for _, accepted in tokens),
        num_steps=1,
        reported_tokens=tuple(
            ReportedToken(text=text, accepted=accepted) for text, accepted in tokens
        ),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def test_the_flow_of_a_step_separates_accepted_from_appended() -> None:
    step = chunk(("return", True), (" ", True), ("self", False), num_draft_tokens=7)
    assert quickstart.flow(step).split(None, 2) == ["7", "2", "'return ' + 'self'"]
    assert quickstart.texts(chunk(("self", False))) == "'self'"


def test_a_chunk_of_several_steps_is_shown_as_a_whole() -> None:
    steps = chunk(("a", False), (" +", True), (" b", False), num_draft_tokens=9, num_steps=2)
    assert quickstart.flow(steps).split(None, 2) == ["9", "1", "'a + b'"]
    assert quickstart.numbered(3, 6) == "3-6"
    assert quickstart.numbered(3, 3) == "3"


@pytest.mark.parametrize("marks", [demo.PLAIN, demo.COLOURED])
def test_the_demo_marks_accepted_tokens_alone(
    marks: demo.Marks, capsys: pytest.CaptureFixture[str]
) -> None:
    step = chunk(("return", True), ("", True), (" self", False), num_draft_tokens=7)
    steps = chunk((" +", False), (" ", True), ("1", True), (" - x", False), num_steps=2)
    run = demo.Run(chunks=(step, steps), usage=Usage(), duration_s=1.0)
    demo.show(run, marks)
    shown = capsys.readouterr().out
    before, after = marks.before, marks.after
    assert f"{before}return{after} self +{before} 1{after} - x\n" in shown


def test_the_demo_says_when_speculation_changed_the_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = demo.Run(
        chunks=(chunk(("a", False), ("b", False)),), usage=Usage(num_steps=2), duration_s=1.0
    )
    other = replace(one, chunks=(chunk(("a", False)),), duration_s=0.5)
    demo.compare([one], [replace(one, duration_s=0.5)])
    shown = capsys.readouterr().out
    assert "2.0 times as fast" in shown
    assert "NOT" not in shown
    demo.compare([one], [other])
    assert "NOT THE SAME tokens" in capsys.readouterr().out


def test_the_shown_task_exists() -> None:
    assert demo.EXACT_TASK == quickstart.EXACT_TASK < len(read_heldout())
