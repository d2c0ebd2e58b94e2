"""Survived failures (docs/acceptance.md): drills lose, repeat and change no token."""

from collections.abc import Iterator

import pytest

from tests.drills.catalogue import DRILLS, Drill, carry_out, short_form
from tests.drills.fleet import Fleet, running_fleet
from tests.drills.requests import Losses
from tests.drills.run import Undisturbed

# Of each service one, and all of them together; the others come with `--long`.
ALWAYS = ("verifier killed", "drafter lies", "rolling restart")
TESTED = [
    pytest.param(
        short_form(drill),
        id=drill.name.replace(" ", "-"),
        marks=[] if drill.name in ALWAYS else pytest.mark.long,
    )
    for drill in DRILLS
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    return Undisturbed()


@pytest.mark.parametrize("drill", TESTED)
async def test_no_token_is_lost_repeated_or_changed(
    drill: Drill, fleet: Fleet, undisturbed: Undisturbed
) -> None:
    outcome = await carry_out(drill, fleet, undisturbed)
    assert outcome.problems == []
    assert outcome.losses == Losses()
    assert outcome.num_requests > 0
