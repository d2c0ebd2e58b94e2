"""The drill of hostile input: the fuzz run (docs/testing.md) against a stack of its own."""

import random
import tempfile
from pathlib import Path

from tests.drills.run import Run
from tests.fuzz.campaign import run_campaign
from tests.fuzz.services import running_services

_NUM_INPUTS = 600


async def fuzzed(run: Run) -> None:
    """Malformed and absurd messages to every method; a bystander's tokens do not change."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_services(Path(folder)) as services,
    ):
        report = await run_campaign(
            services, num_inputs=_NUM_INPUTS, seed=random.randrange(1 << 32)
        )
    run.outcome.num_requests += report.num_bystander_requests
    run.outcome.problems += report.failures
