"""Recording a small model, and the recordings of the real one."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.real import record
from benchmarks.real.recordings import FOLDER, Recording, read_recordings, write_recordings
from benchmarks.real.tasks import ANSWER_TOKENS, PromptMaker, conversations
from tests.benchmarks.test_real import TEMPLATE
from tests.servicekit.gguf_files import write_model


@pytest.mark.timeout(600)
def test_turns_follow_their_answers_and_questions_share_a_text(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": TEMPLATE}
    model = write_model(tmp_path / "small.gguf", "Q4_1", context=4096, metadata=metadata)
    kinds = ["turns", "quote"]
    record.main(["--quick", "--model", str(model), "--kinds", *kinds, "--folder", str(tmp_path)])
    maker = PromptMaker(model)
    for kind in kinds:
        first, second = read_recordings(tmp_path / f"{kind}.npz.xz")[:2]
        conversation = conversations()[kind][0]
        assert first.prompt_token_ids.tolist() == maker.prompt(conversation.turns[:1])
        answer = maker.tokenizer.decode(first.output_token_ids.tolist())
        said = [conversation.turns[0], answer] if kind == "turns" else []
        assert second.prompt_token_ids.tolist() == maker.prompt([*said, conversation.turns[1]])
        assert first.conversation == second.conversation == 0
        assert first.top_token_ids[:, 0].tolist() == first.output_token_ids.tolist()
        assert (np.diff(first.top_logprobs) <= 0).all()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    def recording(number: int, num_tokens: int) -> Recording:
        ids = np.arange(num_tokens, dtype=np.uint32)
        return Recording(
            conversation=number,
            prompt_token_ids=ids + 7,
            output_token_ids=ids + 65_000,
            top_token_ids=np.stack([ids, ids + 1, ids + 2], axis=1),
            top_logprobs=np.array([[-0.5, -1.5, -99]] * num_tokens, dtype=np.float32),
        )

    written = [recording(0, 5), recording(3, 2)]
    write_recordings(tmp_path / "kind.npz.xz", written)
    for before, after in zip(written, read_recordings(tmp_path / "kind.npz.xz"), strict=True):
        assert after.conversation == before.conversation
        for name in ("prompt_token_ids", "output_token_ids", "top_token_ids"):
            assert np.array_equal(getattr(after, name), getattr(before, name)), name
        assert after.top_logprobs[0].tolist() == [-0.5, -1.5, -255 / 16]
    with pytest.raises(ValueError, match="output_token_ids: 65999 needs more than 16 bits"):
        write_recordings(tmp_path / "kind.npz.xz", [recording(0, 1000)])


def test_the_recordings_hold_every_prompt_of_the_recipe_in_little_space() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2 << 20
    for kind, of_kind in conversations().items():
        recordings = read_recordings(FOLDER / f"{kind}.npz.xz")
        numbers = [number for number, each in enumerate(of_kind) for _ in each.turns]
        assert [each.conversation for each in recordings] == numbers
        for each in recordings:
            assert 0 < len(each.output_token_ids) <= ANSWER_TOKENS[kind]
            # Where two tokens are equally likely, either may be told first.
            chosen = each.top_token_ids == each.output_token_ids[:, None]
            assert (each.top_logprobs[:, 0] == (each.top_logprobs * chosen).sum(axis=1)).all()
