"""The house stays small where users meet it."""

from tests.repository.house import flags


def test_the_services_have_fewer_than_60_flags() -> None:
    assert len(flags()) < 60
