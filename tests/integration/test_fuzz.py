"""Hostile input (docs/acceptance.md): every input is answered cleanly and affects nobody else."""

from pathlib import Path

import pytest

from tandem.v1 import drafter_pb2, gateway_pb2, verifier_pb2
from tests.fuzz.calls import find_methods
from tests.fuzz.campaign import Report, run_campaign
from tests.fuzz.services import running_services

OURS = {
    f"/{service.full_name}/{method.name}"
    for module in (drafter_pb2, gateway_pb2, verifier_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


async def fuzz(folder: Path, *, num_inputs: int, seed: int) -> Report:
    with running_services(folder) as services:
        found = {method.path for method in find_methods(services)}
        report = await run_campaign(services, num_inputs=num_inputs, seed=seed)
    assert found >= OURS
    assert "/grpc.health.v1.Health/Check" in found
    assert report.failures == []
    assert report.num_inputs >= num_inputs
    assert report.num_bystander_requests > 0
    return report


async def test_hundreds_of_inputs_are_answered_and_change_no_other_output(tmp_path: Path) -> None:
    report = await fuzz(tmp_path, num_inputs=600, seed=1)
    # Every method got inputs and answered some of them.
    for path in OURS:
        name = path.rpartition(".")[2]
        codes = {
            code for (method, code), _ in report.statuses.items() if method.endswith(f" {name}")
        }
        assert codes - {"CANCELLED"}, f"{path} was never answered"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3])
async def test_many_inputs_are_answered_and_change_no_other_output(
    tmp_path: Path, seed: int
) -> None:
    await fuzz(tmp_path, num_inputs=20_000, seed=seed)
