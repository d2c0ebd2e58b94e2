"""Replays against answers that are simple enough to count by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real import replay
from benchmarks.real.depths import (
    FIXED,
    Draft,
    Fixed,
    Hinted,
    Learned,
    run_streams,
)
from benchmarks.real.drafters import MOST_DRAFTS, LlamaMod, LlamaSimple, TandemDrafter
from benchmarks.real.recordings import Recording, write_recordings

MS_BY_ROWS = np.arange(4.0, 1000.0)


def recording(prompt: Sequence[int], output: Sequence[int]) -> Recording:
    ids = np.array(output, dtype=np.uint32)
    return Recording(
        conversation=0,
        prompt_token_ids=np.array(prompt, dtype=np.uint32),
        output_token_ids=ids,
        top_token_ids=np.stack([ids, ids + 1, ids + 2], axis=1),
        top_logprobs=np.full((len(ids), 3), -1, dtype=np.float32),
    )


def test_a_draft_is_asked_for_at_every_token_and_compared_with_what_came() -> None:
    [found] = replay.hints_of(
        TandemDrafter(), [recording([5, 1, 2, 3, 4, 6], [1, 2, 3, 4, 9, 8])], "chat"
    )
    # Behind 1 follow 2 3 in the text, twice as many as match; behind 1 2 so 3 4 6 1; behind 1 2 3
    # all up to its end, 4 6 1 2 3; and so on. 9 is new.
    assert found.lengths == [0, 2, 4, 5, 5, 0]
    assert found.agreed == [0, 2, 2, 1, 0, 0]
    assert found.match_lengths == [0, 1, 2, 3, 4, 0]


def test_a_draft_has_room_for_one_more_and_ends_before_a_stop_token() -> None:
    cycle = list(range(100, 148))
    full = recording(cycle, cycle * 2)
    # Ended by 9, before it had as many tokens as an answer may have: 8 alone is left of 8 9 10 11.
    ended = recording([5, 6, 8, 9, 10, 11], [5, 6, 9])
    in_full, before_stop = replay.hints_of(TandemDrafter(), [full, ended], "quote")
    assert in_full.lengths[88:] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert before_stop.lengths == [0, 2, 1]
    assert max(in_full.lengths) == MOST_DRAFTS


def test_a_pool_drafts_from_the_answers_before() -> None:
    answers = [recording([50 + i], [1, 2, 3, 4, 5, 6, 9]) for i in range(2)]
    assert replay.hints_of(TandemDrafter(), answers, "chat")[1].agreed == [0] * 7
    first, second = replay.hints_of(TandemDrafter(is_pooled=True), answers, "chat")
    assert first.agreed == [0] * 7
    assert second.agreed == [0, 2, 4, 3, 2, 1, 0]


def test_llama_drafters_copy_what_followed() -> None:
    text = np.arange(100, 130, dtype=np.uint32)
    simple, mod = LlamaSimple(n=3, m=5), LlamaMod(n=3, least=4, most=6)
    for drafter in (simple, mod):
        drafter.begin(np.array([*text, 7, 110, 111, 112], dtype=np.uint32))
    assert simple.draft()[0] == [113, 114, 115, 116, 117]
    assert mod.draft()[0] == [113, 114, 115, 116, 117, 118]
    for drafter in (simple, mod):
        for token_id in (127, 128, 129):
            drafter.append(token_id)
    # 7 110 111 112 are left, then 127: enough for both; the pool goes on beyond.
    assert simple.draft()[0] == [7, 110, 111, 112, 127]
    mod.begin(np.array([126, 127, 128], dtype=np.uint32))
    assert mod.draft()[0] == [129, 7, 110, 111, 112, 127]
    mod.begin(np.array([9, 9, 9], dtype=np.uint32))
    assert mod.draft()[0] == []


def test_a_loop_is_cut_where_its_third_round_ends() -> None:
    words = [1, 2, 3, *range(10, 20), *range(10, 20), *range(10, 20), *range(10, 20)]
    cut = replay.without_loop(recording([5], words))
    assert cut.output_token_ids.tolist() == words[:33]
    # A short one must go on for longer.
    cut = replay.without_loop(recording([5], [1, *[8] * 40]))
    assert cut.output_token_ids.tolist() == [1, *[8] * 24]
    assert len(replay.without_loop(recording([5], list(range(50)))).output_token_ids) == 50


def test_streams_step_together_and_the_next_answer_takes_the_place_of_one_that_ends() -> None:
    repeats = Hinted(lengths=[0, 9, 9, 9, 9, 9], agreed=[0, 5, 4, 3, 2, 1], match_lengths=[2] * 6)
    new = Hinted(lengths=[0, 2, 2], agreed=[0, 0, 0], match_lengths=[2] * 3)
    # Two at a time: repeats and new, both for one step; new for one more; then none is left.
    outcome = run_streams(Fixed(7), [repeats, new], 2, MS_BY_ROWS)
    assert (outcome.num_tokens, outcome.num_steps) == (7, 2)
    assert outcome.ms == MS_BY_ROWS[2 + 7 + 2] + MS_BY_ROWS[1 + 2]
    outcome = run_streams(Fixed(1), [repeats, new], 1, MS_BY_ROWS)
    assert (outcome.num_tokens, outcome.num_steps) == (7, 3 + 2)


@pytest.mark.parametrize(("agreed", "expected"), [(9, 9), (0, 0)])
def test_the_verifiers_rule_learns_whether_drafts_stand(agreed: int, expected: int) -> None:
    rule = Learned(max_depth=9)
    memory = rule.begin()
    draft = Draft(memory, 4, 9, agreed)
    depths = []
    for _ in range(200):
        [depth] = rule.choose([draft])
        depths.append(depth)
        rule.learn([draft], [depth], float(MS_BY_ROWS[1 + depth]))
    assert np.median(depths[100:]) == expected


def test_the_tables_name_every_drafter_and_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [recording([5, 1, 2, 3, 4, 6], [1, 2, 3, 4, 6, 5, 1, 2, 3, 8])] * 2
    write_recordings(tmp_path / "edit.npz.xz", answers)
    file = tmp_path / "figures.json"
    argv = ["--folder", str(tmp_path), "--kinds", "edit", "--streams", "1", "--json", str(file)]
    replay.main([*argv, "--ms", "1:10,2:11"])
    figures = json.loads(file.read_text())
    # Drafts and tokens: 2 3, 2 3 4; 6 1 2 3 4, 6 5; 1 2, 1 2 3; 4 6 1 2 3 4 6 5, 8.
    assert {row["drafter"]: row["edit"] for row in figures["drafting"]}["Tandem"] == "2.25 / 3.40"
    ratios = {row["rule"]: row["edit"] for row in figures["depths"]}
    assert float(ratios["K 0"]) < 1 == max(float(ratios[f"K {most}"]) for most in FIXED)
    with pytest.raises(SystemExit):
        replay.main([*argv, "--ms", "2:3,2:4"])
    assert "'2:3,2:4' is not ROWS:MS, two points at least" in capsys.readouterr().err
