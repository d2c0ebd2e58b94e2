"""An alias stands for several models: requests are shared by weight, and stay where they belong."""

import json
from collections import Counter
from typing import Any

import grpc
import pytest

from gateway.api.openai.reading import requests
from gateway.api.openai.reading.requests import beginning_of
from gateway.api.openai.reading.schema import ChatCompletionRequest, CompletionRequest
from gateway.api.openai.responses.schema import ResponsesRequest
from gateway.routing.aliases import PREFIX_CHARACTERS, choose_model, key_of, parse_aliases
from tandem.v1 import gateway_pb2
from tests.gateway.conftest import StartVerifier
from tests.gateway.openai.clients import get, post
from tests.gateway.running_gateway import RunningGateway, StartGateway, error_of, until
from tests.gateway.scripted_verifier import ScriptedVerifier

KEYS = [key_of(f"user {index}", "") for index in range(4000)]
OLD_AND_NEW = {"old": 3, "new": 1}


class TestChoice:
    def test_entries_of_one_name_make_one_alias(self) -> None:
        texts = ["chat=old:3", "chat=new:1", "code=qwen:8b:2"]
        assert parse_aliases(texts) == {"chat": OLD_AND_NEW, "code": {"qwen:8b": 2}}

    @pytest.mark.parametrize(
        "text",
        [
            "chat",
            "chat=",
            "chat=old",
            "chat=:1",
            "=old:1",
            "chat=old:",
            "chat=old:0",
            "chat=old:1.5",
            "chat=old:²",
        ],
    )
    def test_what_is_no_entry_is_refused_by_name(self, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            parse_aliases(["other=model:1", text])

    def test_a_model_twice_in_one_alias_is_refused(self) -> None:
        with pytest.raises(ValueError, match="has old already"):
            parse_aliases(["chat=old:1", "chat=old:2"])

    @pytest.mark.parametrize(
        "weights",
        [{"old": 1, "new": 1}, OLD_AND_NEW, {"old": 95, "new": 5}, {"a": 1, "b": 2, "c": 3}],
    )
    def test_requests_are_shared_by_weight(self, weights: dict[str, int]) -> None:
        counts = Counter(choose_model(weights, key, weights) for key in KEYS)
        for model_id, weight in weights.items():
            share = weight / sum(weights.values())
            deviation = (share * (1 - share) / len(KEYS)) ** 0.5
            assert abs(counts[model_id] / len(KEYS) - share) < 4 * deviation

    def test_a_larger_weight_moves_keys_to_its_model_only(self) -> None:
        before = {key: choose_model(OLD_AND_NEW, key, OLD_AND_NEW) for key in KEYS}
        larger = {"old": 3, "new": 3}
        moved = [key for key in KEYS if choose_model(larger, key, larger) != before[key]]
        assert {before[key] for key in moved} == {"old"}
        # From a quarter to a half.
        assert 0.2 < len(moved) / len(KEYS) < 0.3

    def test_the_others_get_the_keys_of_a_model_that_is_not_served(self) -> None:
        weights = {"a": 1, "b": 2, "c": 3}
        for key in KEYS[:200]:
            chosen = choose_model(weights, key, weights)
            others = weights.keys() - {chosen}
            assert choose_model(weights, key, others) in others
            for other in others:
                assert choose_model(weights, key, weights.keys() - {other}) == chosen
            assert choose_model(weights, key, ()) in weights

    def test_what_follows_a_long_beginning_does_not_count(self) -> None:
        beginning = "x" * PREFIX_CHARACTERS
        assert key_of("", beginning + "a") == key_of("", beginning + "b")
        assert key_of("", "a") != key_of("", "b")
        assert key_of("a", "") != key_of("", "a")


@pytest.mark.stand_in
class TestGateway:
    """Verifiers of two models, and an alias of both."""

    @pytest.fixture(autouse=True)
    async def start(self, start_gateway: StartGateway, start_verifier: StartVerifier) -> None:
        self.verifiers: dict[str, ScriptedVerifier] = {}
        for model_id, length in (("old", 4000), ("new", 3000)):
            verifier = await start_verifier(max_model_len=length)
            verifier.model_id, verifier.model_digest = model_id, f"digest of {model_id}"
            verifier.play(lambda opened: [5, 0])
            self.verifiers[model_id] = verifier
        self.running: RunningGateway = await start_gateway(
            verifiers=[verifier.address for verifier in self.verifiers.values()],
            model_aliases=["chat=old:1", "chat=new:1", "old=old:1", "old=new:1", "none=gone:1"],
            http_listen="127.0.0.1:0",
        )
        await until(lambda: all(link.welcome for link in self.running.gateway.fleet.verifiers))

    def opened(self) -> dict[str, int]:
        return {name: len(each.commands("open")) for name, each in self.verifiers.items()}

    async def models_of(self, alias: str, *keys: str) -> list[str]:
        outputs = [await self.running.generate(1, model_id=alias, affinity_key=key) for key in keys]
        return [output.started.model_id for output in outputs if output.started]

    @pytest.mark.parametrize("alias", ["chat", "old"])
    async def test_each_key_has_a_model_and_each_model_has_keys(self, alias: str) -> None:
        keys = [f"user {index}" for index in range(12)]
        chosen = await self.models_of(alias, *keys)
        assert set(chosen) == {"old", "new"}
        assert await self.models_of(alias, *keys) == chosen
        assert self.opened() == {name: 2 * chosen.count(name) for name in ("old", "new")}
        for name in ("old", "new"):
            # Metrics know no alias.
            counted = self.running.sample("tandem_request_success_total", model=name)
            assert counted == 2 * chosen.count(name)
        assert self.running.sample("tandem_request_success_total", model="chat") == 0

    async def test_without_a_key_the_prompts_beginning_decides(self) -> None:
        begin, rest = [[prompt] * 300 for prompt in range(1, 9)], [9, 8]
        chosen = []
        for prompt in begin:
            outputs = [
                await self.running.generate(*p, model_id="chat") for p in (prompt, prompt + rest)
            ]
            first, second = (output.started for output in outputs)
            assert first is not None
            assert second is not None
            assert first.model_id == second.model_id
            chosen.append(first.model_id)
        assert set(chosen) == {"old", "new"}

    async def test_over_http_the_answer_names_the_model(self) -> None:
        chosen = set()
        for index in range(12):
            key = f"user {index}"
            bodies = [
                {"model": "chat", "prompt": prompt, "max_tokens": 2, **who}
                for prompt, who in (([1], {"user": key}), ([2, 3], {"prompt_cache_key": key}))
            ]
            answers = [await post(self.running, "/v1/completions", body) for body in bodies]
            [model_id] = {json.loads(answer.body)["model"] for answer in answers}
            [same] = await self.models_of("chat", key)
            assert same == model_id, "gRPC and HTTP choose alike"
            chosen.add(model_id)
        assert chosen == {"old", "new"}

    async def test_aliases_are_listed_with_what_all_their_models_can(self) -> None:
        response = await self.running.stub.ListModels(gateway_pb2.ListModelsRequest())
        found = {each.model_id: each for each in response.models}
        assert len(response.models) == len(found) == 3
        assert found.keys() == {"old", "new", "chat"}, "no model of the last one is served"
        for name in ("chat", "old"):
            assert set(found[name].alias_of) == {"old", "new"}
            assert (found[name].max_model_len, found[name].num_verifiers) == (3000, 2)
            assert found[name].model_digest == ""
        assert (list(found["new"].alias_of), found["new"].model_digest) == ([], "digest of new")
        listed = json.loads((await get(self.running, "/v1/models")).body)["data"]
        assert {each["id"]: each.get("alias_of") for each in listed} == {
            "old": ["old", "new"],
            "chat": ["old", "new"],
            "new": None,
        }
        one = json.loads((await get(self.running, "/v1/models/chat")).body)
        assert one in listed
        assert one["max_model_len"] == 3000

    async def test_the_other_model_serves_while_one_is_gone(self) -> None:
        keys = [f"user {index}" for index in range(8)]
        before = await self.models_of("chat", *keys)
        [link] = [
            each for each in self.running.gateway.fleet.verifiers
            if each.welcome and each.welcome.model_id == "new"
        ]  # fmt: skip
        self.verifiers["new"].send(self.verifiers["new"].draining())
        await until(lambda: link.is_draining)
        assert set(await self.models_of("chat", *keys)) == {"old"}
        assert set(before) == {"old", "new"}
        error = await error_of(self.running.call(1, model_id="new"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE

    async def test_a_request_that_goes_on_keeps_its_model(self) -> None:
        for expected in ("old", "new"):
            digest = f"digest of {expected}"
            for index in range(4):
                output = await self.running.generate(
                    1,
                    model_id="chat",
                    affinity_key=f"user {index}",
                    expected_model_digest=digest,
                )
                assert output.started is not None
                assert output.started.model_id == expected

    async def test_an_alias_of_models_that_are_not_served_is_refused_by_their_names(self) -> None:
        error = await error_of(self.running.call(1, model_id="none"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "'gone' is not served" in str(error.details())


def test_a_conversation_has_one_beginning_in_all_its_turns() -> None:
    system = {"role": "system", "content": "Be short."}
    turns = [[{"role": "user", "content": "Hello"}]]
    turns.append(
        [*turns[0], {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "?"}]
    )
    chats = [parse(ChatCompletionRequest, messages=[system, *messages]) for messages in turns]
    assert beginning_of(chats[0]) == beginning_of(chats[1]) == "system: Be short.\nuser: Hello"
    responses = [parse(ResponsesRequest, input=given) for given in ("Hello", *turns)]
    assert {beginning_of(each) for each in responses} == {"user: Hello"}
    completions = [parse(CompletionRequest, prompt=given) for given in ("a", ["a", "b"], [1, 2])]
    assert [beginning_of(each) for each in completions] == ["a", "a", "1 2"]


def parse(kind: type[Any], **fields: Any) -> Any:
    return requests.parse(kind, json.dumps({"model": "chat", **fields}).encode())
