"""With any drafts, the output is that of plain decoding, also where the model fails.

Rows after the first rejected draft have no effect; an accepted draft is a token like any other.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.values import DraftWait
from tests.scripted_model import hashed
from tests.verifier.running_engine import is_terminal, start_engine_with
from tests.volume import examples
from verifier.engine.messages import Decided

pytestmark = pytest.mark.stand_in

ALWAYS = DraftWait.ALWAYS


@given(
    bad=st.sets(st.integers(0, 2), max_size=1),
    stops=st.sets(st.integers(0, 2), max_size=1),
    hints=st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=8),
    num_right=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    num_prompt_tokens=st.integers(1, 9),
)
@settings(max_examples=examples(60), deadline=None)
def test_any_drafts_of_a_failing_model_end_as_without_drafts(
    bad: set[int],
    stops: set[int],
    hints: list[list[int]],
    num_right: list[int],
    num_prompt_tokens: int,
) -> None:
    """The rule fails after every third occurrence of a token, and after any token over 2."""

    def rule(known: list[int]) -> int | None:
        if max(known) > 2 or any(known.count(token_id) > 3 for token_id in bad):
            return None
        return hashed(known)

    running = start_engine_with(rule=rule)
    try:
        session = running.attach()
        prompt = [i % 3 for i in range(num_prompt_tokens)]
        ends = []
        for is_hinted in (False, True):
            sequence_id = session.open(
                prompt,
                max_new_tokens=12,
                draft_wait=ALWAYS,
                stop_token_ids=frozenset(stops),
                cache_salt=str(is_hinted),
            )
            turn = 0
            while not any(map(is_terminal, session.of(sequence_id))):
                session.read()
                known = prompt + session.output(sequence_id)
                hint: list[int] = []
                if is_hinted:
                    hint = [hashed(known)] if num_right[turn % len(num_right)] else []
                    while len(hint) < num_right[turn % len(num_right)]:
                        hint.append(hashed([*known, *hint]))
                    hint += hints[turn % len(hints)]
                turn += 1
                session.hint(sequence_id, len(known), hint)
            end = session.wait_end(sequence_id)
            reason = end.finish_reason if isinstance(end, Decided) else type(end.error)
            ends.append((reason, session.output(sequence_id)))
        assert ends[0] == ends[1]
    finally:
        running.stop()
