"""How many drafters a session may name."""

import pytest
import structlog

from verifier.errors import InvalidRequestError
from verifier.service.named_drafters import MAX_NEW_NAMES, NamedDrafters


class Session:
    """What names drafters, and a clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.drafters = NamedDrafters(lambda each: "evil" not in each, clock=lambda: self.now_s)

    def name(self, address: str) -> bool:
        """Whether the drafter is used."""
        return self.drafters.admit(address, field="drafter_address")


@pytest.fixture
def session() -> Session:
    return Session()


def test_what_the_operator_does_not_allow_is_refused_and_costs_nothing(session: Session) -> None:
    for index in range(2 * MAX_NEW_NAMES):
        with pytest.raises(InvalidRequestError, match=f"evil-{index}:1") as caught:
            session.name(f"evil-{index}:1")
        assert caught.value.field == "drafter_address"
    assert session.name("drafter:1")


def test_many_new_names_are_not_used_and_those_in_use_are(session: Session) -> None:
    for index in range(MAX_NEW_NAMES):
        assert session.name(f"drafter-{index}:1")
    for index in range(MAX_NEW_NAMES):
        assert not session.name(f"made-up-{index}:1")
        assert session.name(f"drafter-{index}:1")


def test_one_that_is_named_all_the_time_is_new_once(session: Session) -> None:
    assert session.name("kept:1")
    for index in range(2 * MAX_NEW_NAMES):
        session.now_s += 1.0
        assert session.name(f"new-{index}:1")
        assert session.name("kept:1")
    assert session.drafters._num_free == MAX_NEW_NAMES - 1


def test_what_is_not_used_is_logged_once_a_minute(session: Session) -> None:
    for index in range(MAX_NEW_NAMES):
        session.name(f"drafter-{index}:1")
    with structlog.testing.capture_logs() as log:
        for index in range(100):
            session.name(f"made-up-{index}:1")
        session.now_s += 60.0
        session.drafters._num_free, session.drafters._freed_at_s = 0.0, session.now_s
        session.name("made-up:1")
    assert [line["num_without_drafts"] for line in log] == [1, 100]
    assert log[0]["drafter"] == "made-up-0:1"


def test_what_is_kept_of_names_is_bounded(session: Session) -> None:
    for index in range(10 * MAX_NEW_NAMES):
        session.now_s += 1.0
        assert session.name(f"drafter-{index}:1")
    assert len(session.drafters._named) == MAX_NEW_NAMES
    # Those that were named last are not new; the first one is.
    session.drafters._num_free = 0.0
    assert session.name(f"drafter-{10 * MAX_NEW_NAMES - 1}:1")
    assert not session.name("drafter-0:1")
