"""`/openapi.json`, and requests of all forms that it allows and forbids."""

import asyncio
import json
from typing import Any

import hypothesis
import pydantic
import pytest
from hypothesis import strategies as st

from gateway.api.openai.document import openapi_json
from gateway.api.openai.errors import ApiError
from gateway.api.openai.reading import requests, schema
from gateway.api.openai.responses.schema import ResponsesRequest
from tests.gateway.openai import answer_schema
from tests.gateway.openai.clients import get, post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.openai.response_schema import Response, ResponseEvent
from tests.gateway.scripted_verifier import ScriptedVerifier
from tests.volume import examples

pytestmark = pytest.mark.stand_in

MODELS: dict[str, type[pydantic.BaseModel]] = {
    "/v1/completions": schema.CompletionRequest,
    "/v1/chat/completions": schema.ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
}
ANSWERS: dict[str, type[pydantic.BaseModel]] = {
    "/v1/completions": answer_schema.Completion,
    "/v1/chat/completions": answer_schema.ChatCompletion,
    "/v1/responses": Response,
}

# What any field may be given.
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 1e308, 0.5, -0.5]),
    st.text(max_size=6),
    st.lists(st.integers(-1, 3000), max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(st.sampled_from(["5", "x", "include_usage", "tie"]), st.integers(), max_size=2),
)


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Requests with a valid prompt mostly, and some other fields of any value."""
    messages = st.just([{"role": "user", "content": "hi"}])
    prompt: dict[str, st.SearchStrategy[Any]] = {
        "/v1/completions": {
            "prompt": st.one_of(st.just("abc"), st.just([1, 2]), st.just(["a", "b"]), ODD)
        },
        "/v1/chat/completions": {"messages": st.one_of(messages, ODD)},
        "/v1/responses": {"input": st.one_of(messages, st.just("hi"), ODD)},
    }[path]
    others = sorted(MODELS[path].model_fields.keys() - prompt.keys() - {"model"})
    model = st.sampled_from(["scripted"] * 4 + ["other"])
    return st.builds(
        lambda needed, given: {**needed, **given},
        st.fixed_dictionaries({"model": model, **prompt}),
        st.dictionaries(st.sampled_from([*others, "bogus"]), ODD, max_size=3),
    )


@pytest.mark.parametrize("path", list(MODELS))
async def test_every_body_is_answered_or_refused_in_form(
    start_api: StartApi, verifier: ScriptedVerifier, path: str
) -> None:
    verifier.play(lambda opened: [5, 6, 0])
    running = await start_api()
    loop = asyncio.get_running_loop()

    async def check(body: dict[str, Any]) -> None:
        answer = await post(running, path, body)
        if answer.status != 200:
            assert answer.status in (400, 404), answer.body
            assert answer.error["type"] == "invalid_request_error"
            assert answer.error["message"]
        elif answer.headers["content-type"].startswith("text/event-stream"):
            if path == "/v1/responses":
                events = [ResponseEvent.model_validate(each).root for each in answer.typed_events]
                assert events[-1].type in ("response.completed", "response.incomplete")
            else:
                assert answer.events[-1] == "[DONE]"
        else:
            ANSWERS[path].model_validate_json(answer.body)

    @hypothesis.settings(max_examples=examples(150))
    @hypothesis.given(bodies(path))
    def fuzz(body: dict[str, Any]) -> None:
        asyncio.run_coroutine_threadsafe(check(body), loop).result()

    await asyncio.to_thread(fuzz)
    await running.until_idle()


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
