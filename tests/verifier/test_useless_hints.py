"""What new sequences expect of their hints, after texts that repeat and texts that do not."""

from verifier.drafts.draft_wait import FirstTokenRecord
from verifier.drafts.speculation_policy import MOST_USELESS_HINTS
from verifier.drafts.useless_hints import UselessHintsPrior


def observe(record: FirstTokenRecord, *outcomes: bool) -> None:
    for right in outcomes:
        record.record_hint(0, [7 if right else 8], [7])


def after_a_useless_hint(prior: UselessHintsPrior) -> int:
    """What the first useless hint of a new sequence counts as."""
    record = prior.begin()
    observe(record, False)
    return record.num_useless_hints


def run(prior: UselessHintsPrior, num_sequences: int, *outcomes: bool) -> None:
    for _ in range(num_sequences):
        record = prior.begin()
        observe(record, *outcomes)
        prior.learn(record)


def test_a_first_sequence_has_no_useless_hint_behind_it() -> None:
    assert after_a_useless_hint(UselessHintsPrior()) == 1


def test_after_texts_that_do_not_repeat_one_useless_hint_is_enough() -> None:
    prior = UselessHintsPrior()
    run(prior, 20, *[False] * 11)
    assert after_a_useless_hint(prior) == MOST_USELESS_HINTS
    # What few hints are requested from then on does not change it.
    run(prior, 50, False, False)
    assert after_a_useless_hint(prior) == MOST_USELESS_HINTS


def test_texts_that_repeat_are_believed_again_after_some_sequences() -> None:
    prior = UselessHintsPrior()
    run(prior, 20, *[False] * 11)
    run(prior, 15, False, True, True)
    assert after_a_useless_hint(prior) == 1


def test_one_right_hint_in_eight_makes_the_others_worth_it() -> None:
    prior = UselessHintsPrior()
    run(prior, 50, True, *[False] * 7)
    assert after_a_useless_hint(prior) == 1
    run(prior, 50, True, *[False] * 19)
    assert after_a_useless_hint(prior) == MOST_USELESS_HINTS


def test_a_sequence_without_a_hint_teaches_nothing() -> None:
    prior = UselessHintsPrior()
    run(prior, 20, *[False] * 11)
    run(prior, 100)
    assert after_a_useless_hint(prior) == MOST_USELESS_HINTS
