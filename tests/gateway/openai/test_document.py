"""`/openapi.json`, and requests of all forms that it allows and forbids."""

import json

import hypothesis
import pydantic
import pytest
from hypothesis import strategies as st

from gateway.api.openai.document import openapi_json
from gateway.api.openai.errors import ApiError
from gateway.api.openai.reading import requests, schema
from gateway.api.openai.responses.schema import ResponsesRequest
from tests.gateway.openai.clients import get
from tests.gateway.openai.conftest import StartApi

pytestmark = pytest.mark.stand_in

MODELS: dict[str, type[pydantic.BaseModel]] = {
    "/v1/completions": schema.CompletionRequest,
    "/v1/chat/completions": schema.ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
}


@hypothesis.given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_a_body_of_any_bytes_is_parsed_or_refused(body: bytes) -> None:
    for model in MODELS.values():
        with pytest.raises(ApiError) as caught:
            requests.parse(model, body)
        assert caught.value.status == 400


async def test_the_document_is_served_and_whole(start_api: StartApi) -> None:
    running = await start_api()
    answer = await get(running, "/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    document = json.loads(answer.body)
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        *("/health", "/ready", "/metrics", "/v1/models", "/v1/models/{model}"),
        *MODELS,
    }
    # Every reference leads somewhere.
    known = document["components"]["schemas"]
    found = json.dumps(document).split('"#/components/schemas/')[1:]
    assert {reference.split('"')[0] for reference in found} <= set(known)


def test_the_document_names_every_field_and_what_it_is_for() -> None:
    schemas = json.loads(openapi_json())["components"]["schemas"]
    for model in MODELS.values():
        described = schemas[model.__name__]["properties"]
        assert set(described) == set(model.model_fields)
    assert "draft" in schemas["Speculation"]["description"]
    # Where two models have one name, pydantic puts their modules before it.
    assert [name for name in schemas if "__" in name] == []
