"""Survived failures (docs/acceptance.md): drills lose, repeat and change no token."""

import functools
from collections.abc import Iterator

import pytest

from tests.drills import drafters
from tests.drills import fleet as fleet_module
from tests.drills.catalogue import DRILLS, Drill, carry_out, short_form
from tests.drills.fleet import Fleet, running_fleet
from tests.drills.requests import Losses
from tests.drills.run import Run, Undisturbed, until
from tests.volume import cases

# tests/integration/test_fuzz.py is the short form of that drill.
# The first two differ in what verifiers notice.
OF_THE_DRAFTER = [
    drill
    for drill in DRILLS
    if drill.name.startswith(("verifier-drafter", "drafter")) and drill.name != "drafter lies"
]
TESTED = [short_form(drill) for drill in DRILLS if drill.name != "hostile input"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    return Undisturbed()


@pytest.mark.parametrize("drill", TESTED, ids=lambda drill: drill.name.replace(" ", "-"))
async def test_no_token_is_lost_repeated_or_changed(
    drill: Drill, fleet: Fleet, undisturbed: Undisturbed
) -> None:
    outcome = await carry_out(drill, fleet, undisturbed)
    assert outcome.problems == []
    assert outcome.losses == Losses()
    assert outcome.num_requests > 0


@pytest.mark.parametrize(
    "drill",
    cases(OF_THE_DRAFTER[:2], OF_THE_DRAFTER),
    ids=lambda drill: drill.name.replace(" ", "-"),
)
async def test_a_drafter_that_nothing_disturbs_fails_its_drills(
    drill: Drill, fleet: Fleet, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "disturb", lambda self, action: None)
    # There is nothing to wait for, neither a sign nor an end.
    monkeypatch.setattr(drafters, "until", functools.partial(until, timeout_s=0.5))
    monkeypatch.setattr(fleet_module, "STOP_TIMEOUT_S", 0.1)
    outcome = await carry_out(drill, fleet, undisturbed)
    assert "a verifier did not notice that the drafter was lost" in outcome.problems
