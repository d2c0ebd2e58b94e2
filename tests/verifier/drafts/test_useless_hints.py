"""What new sequences expect of their hints, after texts that repeat and texts that do not."""

from verifier.drafts.draft_wait import HintRecord
from verifier.drafts.hint_requests import USELESS_HINTS_BEFORE_PROBING
from verifier.drafts.useless_hints import MOST_USELESS_HINTS, UselessHintsPrior


def observe(record: HintRecord, *outcomes: bool) -> None:
    for right in outcomes:
        record.record_request()
        record.record_hint(0, [7 if right else 8, 9], [7])


def at_the_first_request(prior: UselessHintsPrior) -> int:
    """How many useless hints count when a new sequence has requested its first."""
    record = prior.begin()
    assert record.num_useless_hints == 0, "the first request is made at once"
    record.record_request()
    return record.num_useless_hints


def run(prior: UselessHintsPrior, num_sequences: int, *outcomes: bool) -> None:
    for _ in range(num_sequences):
        record = prior.begin()
        observe(record, *outcomes)
        prior.learn(record)


def run_unanswered(prior: UselessHintsPrior, *, num_requests: int) -> None:
    for _ in range(20):
        record = prior.begin()
        for _ in range(num_requests):
            record.record_request()
        prior.learn(record)


def test_texts_that_repeat_are_believed_again_after_some_sequences() -> None:
    prior = UselessHintsPrior()
    run(prior, 20, *[False] * 11)
    run(prior, 15, False, True, True)
    assert at_the_first_request(prior) == 0


def test_one_right_hint_in_eight_makes_the_others_worth_it() -> None:
    prior = UselessHintsPrior()
    run(prior, 50, True, *[False] * 7)
    assert at_the_first_request(prior) == 0
    run(prior, 50, True, *[False] * 19)
    assert at_the_first_request(prior) == MOST_USELESS_HINTS


def test_hints_that_come_too_late_are_useless() -> None:
    prior = UselessHintsPrior()
    run_unanswered(prior, num_requests=USELESS_HINTS_BEFORE_PROBING)
    assert at_the_first_request(prior) == MOST_USELESS_HINTS
    # So few are made from then on; they change nothing.
    run_unanswered(prior, num_requests=1)
    assert at_the_first_request(prior) == MOST_USELESS_HINTS


def test_a_sequence_without_a_request_teaches_nothing() -> None:
    prior = UselessHintsPrior()
    run(prior, 20, *[False] * 11)
    run(prior, 100)
    assert at_the_first_request(prior) == MOST_USELESS_HINTS
