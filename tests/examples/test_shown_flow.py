"""How the examples show drafted, accepted and appended tokens."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from examples import demo, quickstart
from examples.demo_model.dataset import MODEL_FOLDER, read_heldout
from examples.token_text import TokenText
from tandem.client import Chunk, Event, Finished, FinishReason, Usage


def ids_of(text: str) -> tuple[int, ...]:
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def chunk(token_ids: tuple[int, ...], **fields: int) -> Chunk:
    made = Chunk(
        choice_index=0,
        offset=0,
        token_ids=token_ids,
        text="",
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_steps=1,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def test_the_pieces_of_an_output_join_to_its_text() -> None:
    text = "def naïve(x):\n    return '→ 🚀' + x\n"
    token_text = TokenText(MODEL_FOLDER)
    pieces = [token_text.add([token_id]) for token_id in ids_of(text)]
    assert "".join(pieces) == text
    assert len(pieces) > 10


def test_an_end_token_is_silent() -> None:
    token_text = TokenText(MODEL_FOLDER)
    assert token_text.add([*ids_of("x = 1"), *ids_of("<|end|>")]) == "x = 1"


def test_the_flow_of_a_step_separates_accepted_from_appended() -> None:
    token_ids = ids_of("return self")
    step = chunk(token_ids, num_draft_tokens=7, num_accepted_tokens=len(token_ids) - 1)
    line = quickstart.flow(step, TokenText(MODEL_FOLDER))
    counts, _, texts = line.partition("  '")
    assert counts.split() == ["7", str(len(token_ids) - 1)]
    accepted, appended = (part.strip("'") for part in texts.split(" + "))
    assert accepted + appended == "return self"
    assert appended == TokenText(MODEL_FOLDER).add(token_ids[-1:])


def test_a_chunk_of_several_steps_is_shown_as_a_whole() -> None:
    steps = chunk(ids_of("a + b"), num_draft_tokens=9, num_accepted_tokens=3, num_steps=4)
    assert quickstart.flow(steps, TokenText(MODEL_FOLDER)).split(None, 2) == ["9", "3", "'a + b'"]
    assert quickstart.numbered(3, 6) == "3-6"
    assert quickstart.numbered(3, 3) == "3"


def test_reading_ahead_hands_on_every_event_and_the_error() -> None:
    events = [chunk((1,)), chunk((2,))]

    def failing() -> Iterator[Event]:
        yield from events
        raise ConnectionError("gone")

    assert list(quickstart.read_ahead(iter(events))) == events
    ahead = quickstart.read_ahead(failing())
    assert [next(ahead), next(ahead)] == events
    with pytest.raises(ConnectionError, match="gone"):
        next(ahead)


def test_the_summary_names_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    usage = Usage(
        output_tokens=21,
        num_steps=13,
        num_drafts=7,
        num_draft_tokens=14,
        num_accepted_tokens=8,
        accepted_per_position=(4, 4),
    )
    finished = Finished(choice_index=0, finish_reason=FinishReason.STOP, usage=usage)
    quickstart.show_summary(finished)
    shown = {
        line.strip().rpartition("  ")[0].strip(): line.strip().rpartition("  ")[2].strip()
        for line in capsys.readouterr().out.splitlines()
    }
    assert shown["model steps"] == "13"
    assert shown["steps with drafts"] == "7"
    assert shown["drafted tokens"] == "14"
    assert shown["accepted tokens"] == "8"
    assert shown["steps without drafts"] == "6"
    assert shown["mean acceptance length"] == "2.14"
    assert shown["maximum acceptance length"] == "3"
    assert shown["acceptance per position"] == "0.57 0.57"


@pytest.mark.parametrize("marks", [demo.PLAIN, demo.COLOURED])
def test_the_demo_marks_accepted_tokens_alone(
    marks: demo.Marks, capsys: pytest.CaptureFixture[str]
) -> None:
    token_ids = ids_of("return self")
    accepted = TokenText(MODEL_FOLDER).add(token_ids[:-1])
    step = chunk(token_ids, num_draft_tokens=7, num_accepted_tokens=len(token_ids) - 1)
    plain = chunk(ids_of(" + 1"), num_steps=2, num_draft_tokens=2, num_accepted_tokens=2)
    run = demo.Run(chunks=(step, plain), usage=Usage(), duration_s=1.0)
    demo.show(run, marks)
    shown = capsys.readouterr().out
    appended = "return self".removeprefix(accepted)
    assert f"{marks.before}{accepted}{marks.after}{appended} + 1\n" in shown


def test_the_demo_says_when_speculation_changed_the_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = demo.Run(chunks=(chunk((1, 2)),), usage=Usage(num_steps=2), duration_s=1.0)
    other = replace(one, chunks=(chunk((1, 3)),), duration_s=0.5)
    demo.compare([one], [replace(one, duration_s=0.5)])
    shown = capsys.readouterr().out
    assert "2.0 times as fast" in shown
    assert "NOT" not in shown
    demo.compare([one], [other])
    assert "NOT THE SAME tokens" in capsys.readouterr().out


def test_the_shown_task_exists() -> None:
    assert demo.EXACT_TASK == quickstart.EXACT_TASK < len(read_heldout())
