"""What requests over HTTP get that name no sampling: the model's generation_config.json says it."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.text import sampling_defaults
from gateway.text.sampling_defaults import NO_DEFAULTS, GenerationConfigError
from servicekit.config import ConfigError
from tandem.v1 import gateway_pb2, sampling_pb2
from tandem.values import SamplingDefaults
from tests.gateway.openai.clients import get, post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_verifier import ScriptedVerifier

OWN: dict[str, float] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.125,
    "repetition_penalty": 1.05,
}
OPENAIS: dict[str, float] = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
}
NAMED: dict[str, float] = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
}
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}


def write(folder: Path, **config: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(config))


def shown(sampling: sampling_pb2.SamplingParams) -> dict[str, float]:
    """With the defaults of the .proto file where a value is absent."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.HasField("top_p") else 1,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty
        if sampling.HasField("repetition_penalty")
        else 1,
    }


class TestOfAFolder:
    def test_without_a_file_and_where_it_says_null_they_are_openais(self, tmp_path: Path) -> None:
        for config in (None, {}, dict.fromkeys(OWN)):
            if config is not None:
                write(tmp_path, **config)
            found = sampling_defaults.load(tmp_path, on_ignored=lambda *_: pytest.fail("ignored"))
            assert found == NO_DEFAULTS

    @pytest.mark.parametrize(
        ("name", "value", "taken"),
        [
            ("temperature", 0, 0.0),
            ("top_p", 1, 1.0),
            ("top_k", 0, 0),
            # As vLLM writes it: from all tokens.
            ("top_k", -1, 0),
            # As transformers does that it wrote by default.
            ("top_k", 50, 50),
        ],
    )
    def test_the_ends_of_the_ranges_are_within(
        self, tmp_path: Path, name: str, value: float, taken: float
    ) -> None:
        write(tmp_path, **{name: value})
        found = sampling_defaults.load(tmp_path, on_ignored=lambda *_: pytest.fail("ignored"))
        assert getattr(found, name) == taken

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", float("nan")),
            ("temperature", 10**400),
            ("temperature", "0.6"),
            ("temperature", True),
            ("temperature", [0.6]),
            ("top_k", -2),
            ("top_k", 20.5),
            ("min_p", 1.1),
            ("repetition_penalty", {}),
        ],
    )
    def test_a_value_that_no_request_could_have_is_ignored_and_the_others_count(
        self, tmp_path: Path, name: str, value: Any
    ) -> None:
        write(tmp_path, **{**OWN, name: value})
        ignored: list[str] = []
        found = sampling_defaults.load(tmp_path, on_ignored=lambda name, _: ignored.append(name))
        assert ignored == [name]
        others = {each: OWN[each] for each in OWN if each != name}
        assert found == SamplingDefaults(**others)  # type: ignore[arg-type]

    @pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000])
    def test_a_file_that_is_no_object_is_named(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(GenerationConfigError, match=r"generation_config\.json"):
            sampling_defaults.load(tmp_path, on_ignored=lambda *_: None)


@pytest.mark.stand_in
class TestInAGateway:
    @pytest.mark.parametrize("path", PROMPTS)
    async def test_they_count_where_a_request_names_none_or_null(
        self, start_api: StartApi, verifier: ScriptedVerifier, chat_folder: Path, path: str
    ) -> None:
        write(chat_folder, **OWN)
        verifier.play(lambda opened: [5, 0])
        running = await start_api()
        for index, fields in enumerate(({}, dict.fromkeys(OWN))):
            body = {"model": "scripted", **PROMPTS[path], **fields}
            answer = await post(running, path, body)
            assert answer.status == 200, answer.body
            assert shown((await verifier.nth("open", index)).sampling) == OWN

    async def test_what_a_client_names_wins(
        self, start_api: StartApi, verifier: ScriptedVerifier, chat_folder: Path
    ) -> None:
        write(chat_folder, **OWN)
        verifier.play(lambda opened: [5, 0])
        running = await start_api()
        for path, fields in PROMPTS.items():
            for name in OWN:
                for named in (NAMED[name], OPENAIS[name]):
                    body = {"model": "scripted", **fields, name: named}
                    assert (await post(running, path, body)).status == 200
                    sampling = verifier.commands("open")[-1].sampling
                    assert shown(sampling) == {**OWN, name: named}

    @pytest.mark.parametrize("path", PROMPTS)
    async def test_the_operator_can_leave_them_out(
        self, start_api: StartApi, verifier: ScriptedVerifier, chat_folder: Path, path: str
    ) -> None:
        # Not even read.
        (chat_folder / "generation_config.json").write_text("{")
        verifier.play(lambda opened: [5, 0])
        running = await start_api(generation_config="none")
        body = {"model": "scripted", **PROMPTS[path]}
        assert (await post(running, path, body)).status == 200
        assert shown((await verifier.nth("open", 0)).sampling) == OPENAIS

    async def test_grpc_has_its_own(
        self, start_api: StartApi, verifier: ScriptedVerifier, chat_folder: Path
    ) -> None:
        write(chat_folder, **OWN)
        verifier.play(lambda opened: [5, 0])
        running = await start_api()
        await running.generate(1, 2, max_new_tokens=3)
        sampling = (await verifier.nth("open", 0)).sampling
        assert shown(sampling) == {**OPENAIS, "temperature": 0}

    async def test_the_list_of_models_shows_them_in_both_apis(
        self, start_api: StartApi, chat_folder: Path
    ) -> None:
        write(chat_folder, **OWN)
        running = await start_api()
        [listed] = json.loads((await get(running, "/v1/models")).body)["data"]
        one = json.loads((await get(running, "/v1/models/scripted")).body)
        assert listed["sampling_defaults"] == one["sampling_defaults"] == OWN
        [model] = (await running.stub.ListModels(gateway_pb2.ListModelsRequest())).models
        defaults = model.http_sampling_defaults
        assert {name: getattr(defaults, name) for name in OWN} == OWN

    async def test_a_file_that_cannot_be_read_stops_the_start(
        self, start_api: StartApi, chat_folder: Path
    ) -> None:
        (chat_folder / "generation_config.json").write_text("{")
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            await start_api()
