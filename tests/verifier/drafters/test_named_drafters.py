"""How many drafters a session may name."""

import pytest

from servicekit.errors import RequestError
from verifier.errors import InvalidRequestError, OverloadedError
from verifier.service.named_drafters import MAX_NEW_NAMES, NamedDrafters


class Session:
    """What names drafters, and a clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.drafters = NamedDrafters(lambda each: "evil" not in each, clock=lambda: self.now_s)

    def name(self, address: str) -> RequestError | None:
        """The error that a name gets."""
        try:
            self.drafters.check(address, field="drafter_address")
        except RequestError as caught:
            error = caught
        else:
            return None
        assert error.field == "drafter_address"
        assert repr(address) in error.message
        return error


@pytest.fixture
def session() -> Session:
    return Session()


def test_what_the_operator_does_not_allow_is_refused_and_costs_nothing(session: Session) -> None:
    for index in range(2 * MAX_NEW_NAMES):
        assert isinstance(session.name(f"evil-{index}:1"), InvalidRequestError)
    assert session.name("drafter:1") is None


def test_many_new_names_are_refused_and_those_in_use_are_not(session: Session) -> None:
    for index in range(MAX_NEW_NAMES):
        assert session.name(f"drafter-{index}:1") is None
    for index in range(MAX_NEW_NAMES):
        error = session.name(f"made-up-{index}:1")
        assert isinstance(error, OverloadedError)
        assert error.retry_after_ms == 1000
        assert session.name(f"drafter-{index}:1") is None


def test_new_drafters_may_be_named_in_time(session: Session) -> None:
    for index in range(MAX_NEW_NAMES):
        session.name(f"drafter-{index}:1")
    session.now_s += 3.0
    assert [session.name(f"new-{index}:1") is None for index in range(4)] == [True] * 3 + [False]
    session.now_s += 1e9
    named = [session.name(f"newer-{index}:1") is None for index in range(MAX_NEW_NAMES + 1)]
    assert named == [True] * MAX_NEW_NAMES + [False]


def test_what_is_kept_of_names_is_bounded(session: Session) -> None:
    for index in range(10 * MAX_NEW_NAMES):
        session.now_s += 1.0
        assert session.name(f"drafter-{index}:1") is None
    assert len(session.drafters._named) == MAX_NEW_NAMES
    # Those that were named last are not new; the first one is.
    session.drafters._num_free = 0.0
    assert session.name(f"drafter-{10 * MAX_NEW_NAMES - 1}:1") is None
    assert session.name("drafter-0:1") is not None
