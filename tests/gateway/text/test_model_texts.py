"""Several tokenizers in one gateway: each model's text is made by its own."""

import json
from pathlib import Path

import grpc
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gateway.text.model_text import ModelText, ModelTexts, SameTokenizerError
from gateway.text.tokenizer import Tokenizer
from servicekit.config import ConfigError
from servicekit.errors import field_violation
from tests.gateway.conftest import StartVerifier
from tests.gateway.openai.clients import post
from tests.gateway.running_gateway import StartGateway, error_of, until

WORDS = {"<unk>": 0, "hello": 1, "world": 2, "[user]hello": 3}


@pytest.fixture
def word_folder(tmp_path: Path) -> Path:
    """A tokenizer of whole words, with a chat template."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return tmp_path


class TestWhichOneServes:
    def test_the_digest_decides_and_an_unknown_one_gets_the_only_one(
        self, model_folder: Path, word_folder: Path
    ) -> None:
        first, second = ModelText.load(model_folder), ModelText.load(word_folder)
        both, one = ModelTexts([first, second]), ModelTexts([second])
        assert both.find(first.tokenizer.digest) is first
        assert both.find(second.tokenizer.digest) is second
        assert both.find("") is None, "it could be either's"
        assert one.find("") is second
        assert one.find("0" * 64) is None
        assert ModelTexts([]).find("") is None

    @pytest.mark.parametrize("form", ["hermes", "none"])
    def test_the_tags_of_calls_are_shown_if_calls_are_looked_for(
        self, word_folder: Path, form: str
    ) -> None:
        path = word_folder / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.add_special_tokens([tokenizers.AddedToken("<tool_call>", special=True)])
        tokenizer.save(str(path))
        loaded = ModelText.load(word_folder, tool_calls=form).tokenizer
        text = loaded.decode(loaded.encode("<tool_call>"))
        assert text == ("<tool_call>" if form == "hermes" else "")

    def test_folders_that_a_digest_cannot_tell_apart_are_refused(self, model_folder: Path) -> None:
        with pytest.raises(SameTokenizerError):
            ModelTexts([ModelText.load(model_folder)] * 2)


@pytest.mark.stand_in
class TestInAGateway:
    async def test_two_folders_with_one_tokenizer_stop_the_start(
        self, start_gateway: StartGateway, model_folder: Path
    ) -> None:
        with pytest.raises(ConfigError, match="same tokenizer"):
            await start_gateway(verifiers=["127.0.0.1:1"], tokenizer=[model_folder] * 2)

    async def test_each_model_has_its_own_text_and_template(
        self,
        start_gateway: StartGateway,
        start_verifier: StartVerifier,
        model_folder: Path,
        word_folder: Path,
    ) -> None:
        bare_folder = word_folder / "bare"
        bare_folder.mkdir()
        (bare_folder / "tokenizer.json").symlink_to(model_folder / "tokenizer.json")
        bundled, words = Tokenizer.load(model_folder), Tokenizer.load(word_folder)
        verifiers = {
            name: await start_verifier(vocab_size=2048) for name in ("bytes", "words", "unknown")
        }
        for name, digest in (("bytes", bundled.digest), ("words", words.digest), ("unknown", "")):
            verifiers[name].model_id = name
            verifiers[name].tokenizer_digest = digest
        verifiers["bytes"].play(lambda opened: [*bundled.encode("world"), 0])
        verifiers["words"].play(lambda opened: [2, 0])
        running = await start_gateway(
            verifiers=[each.address for each in verifiers.values()],
            tokenizer=[bare_folder, word_folder],
            http_listen="127.0.0.1:0",
        )
        await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
        for name, token_ids, text in (
            ("bytes", bundled.encode("hello"), "world"),
            ("words", [1], " world"),
        ):
            output = await running.generate(model_id=name, text="hello")
            assert output.text == text
            fields = {"model": name, "prompt": "hello", "echo": True, "temperature": 0}
            answer = await post(running, "/v1/completions", fields)
            assert json.loads(answer.body)["choices"][0]["text"] == "hello" + text
            opened = verifiers[name].commands("open")
            assert [list(each.token_ids) for each in opened] == [token_ids] * 2
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        answer = await post(running, "/v1/chat/completions", {"model": "words", **chat})
        assert json.loads(answer.body)["choices"][0]["message"]["content"] == " world"
        assert list(verifiers["words"].commands("open")[-1].token_ids) == [3]
        answer = await post(running, "/v1/chat/completions", {"model": "bytes", **chat})
        assert (answer.status, answer.error["code"]) == (400, "no_chat_template")

        # Without a tokenizer of its own a model takes token ids, and no text.
        error = await error_of(running.call(model_id="unknown", text="hello"))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        violation = field_violation(error)
        assert violation is not None
        assert violation[0] == "text"
        assert "unknown" in violation[1]
        answer = await post(running, "/v1/chat/completions", {"model": "unknown", **chat})
        assert (answer.status, answer.error["param"]) == (400, "messages")
        verifiers["unknown"].play(lambda opened: [7, 0])
        output = await running.generate(5, model_id="unknown")
        assert (output.token_ids, output.text) == ([7, 0], "")
