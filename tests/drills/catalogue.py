"""All drills, by number."""

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.drills import callers, clients, drafters, rollout, verifiers
from tests.drills.fleet import Fleet
from tests.drills.run import Outcome, Run, Undisturbed, one_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One drill.

    Attributes:
        number: that of docs/acceptance.md; variants have it in common.
        name: what is done to whom.
        carry_out: disturbs a fleet, and restores it.
    """

    number: int
    name: str
    carry_out: Callable[[Run], Awaitable[None]]


def _drill(number: int, name: str, carry_out: Callable[[Run], Awaitable[None]]) -> Drill:
    return Drill(number=number, name=name, carry_out=carry_out)


DRILLS = (
    _drill(1, "verifier killed", verifiers.killed),
    _drill(2, "verifier frozen", verifiers.frozen),
    _drill(3, "gateway-verifier cut", verifiers.cut_off),
    _drill(3, "gateway-verifier reset", verifiers.reset),
    _drill(3, "verifier-drafter cut", drafters.cut_off),
    _drill(3, "verifier-drafter reset", drafters.reset),
    _drill(3, "client-gateway cut", clients.cut_off_client),
    _drill(3, "client-gateway reset", clients.reset_client),
    _drill(4, "drafter killed", drafters.killed),
    _drill(4, "drafter frozen", drafters.frozen),
    _drill(5, "drafter lies", drafters.lying),
    _drill(6, "random cancels", clients.cancels),
    _drill(7, "deadlines", clients.deadlines),
    _drill(8, "K/V exhausted", verifiers.out_of_blocks),
    _drill(9, "reader stops", clients.unread),
    _drill(10, "overload", callers.overload),
    _drill(11, "verifier shut down", verifiers.shut_down),
    _drill(11, "drafter shut down", drafters.shut_down),
    _drill(11, "gateway shut down", clients.shut_down_gateway),
    _drill(12, "rapid resets", clients.rapid_resets),
    _drill(13, "credentials", callers.credentials),
    _drill(15, "rolling restart", rollout.rolling_restart),
    _drill(15, "scaled up and down", rollout.scaled),
    _drill(16, "engine stalled", verifiers.stalled),
    _drill(17, "gateway killed", clients.killed_gateway),
)

# With fewer cancels and resets; otherwise a drill is as short as it can be.
_SHORT_FORMS = {
    "random cancels": functools.partial(clients.cancels, count=200),
    "rapid resets": functools.partial(clients.rapid_resets, count=4_000),
}


def short_form(drill: Drill) -> Drill:
    """The drill for tests."""
    return _drill(drill.number, drill.name, _SHORT_FORMS.get(drill.name, drill.carry_out))


async def carry_out(drill: Drill, fleet: Fleet, undisturbed: Undisturbed) -> Outcome:
    """Carries out a drill once; the fleet is whole and idle before and, if all is well, after."""
    async with one_run(fleet, undisturbed) as run:
        await drill.carry_out(run)
        await run.settle()
        return run.outcome
