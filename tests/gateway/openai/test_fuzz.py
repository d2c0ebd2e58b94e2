"""Requests that the gateway's own document allows, and some that it forbids, by schemathesis."""

import asyncio
import json
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

from gateway.api.openai.document import openapi_json
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_server import PATIENCE_S
from tests.gateway.scripted_verifier import ScriptedVerifier
from tests.volume import examples

pytestmark = pytest.mark.stand_in

# A gateway without a file of clients asks nobody for credentials.
DOCUMENT = {**json.loads(openapi_json()), "security": []}
OPERATIONS = [(path, method) for path, item in DOCUMENT["paths"].items() for method in item]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
async def test_every_answer_is_one_that_the_document_names(
    start_api: StartApi, verifier: ScriptedVerifier, path: str, method: str
) -> None:
    verifier.play(lambda opened: [5, 6, 0])
    # Else no call can be forced.
    running = await start_api(tool_call_parser="hermes")
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]
    modes = schemathesis.GenerationMode
    cases = hypothesis.strategies.one_of(
        operation.as_strategy(generation_mode=modes.POSITIVE),
        operation.as_strategy(generation_mode=modes.NEGATIVE),
    )

    @hypothesis.settings(
        derandomize=True,
        max_examples=examples(60),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases)
    def fuzz(case: Any) -> None:
        model = case.body.get("model") if isinstance(case.body, dict) else None
        if isinstance(model, str) and 0 < len(model) <= 256:
            # A name that is served: the others end in 404.
            case.body["model"] = "scripted"
        base_url = f"http://{running.gateway.http_address}"
        response = case.call(base_url=base_url, timeout=PATIENCE_S)
        assert response.status_code < 500, response.text
        # What the document cannot say, such as parameters that exclude each other, is refused.
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    await asyncio.to_thread(fuzz)
    await running.until_idle()
