"""A gateway with HTTP, a tokenizer and a chat template."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway.text.tokenizer import Tokenizer
from tests.gateway.running_gateway import RunningGateway, StartGateway
from tests.gateway.scripted_verifier import ScriptedVerifier

StartApi = Callable[..., Awaitable[RunningGateway]]

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or () %}({{ call.function | tojson }}){% endfor %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('a tool cannot begin') }}{% endif %}"
    "{% if shout %}!{% endif %}[assistant]"
)


@pytest.fixture
def chat_folder(model_folder: Path, tmp_path: Path) -> Path:
    """The bundled model's tokenizer, with a chat template."""
    (tmp_path / "tokenizer.json").symlink_to(model_folder / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tmp_path


@pytest.fixture
def start_api(
    start_gateway: StartGateway, verifier: ScriptedVerifier, chat_folder: Path
) -> StartApi:
    """Starts a gateway with HTTP in front of `verifier`; its model is called `scripted`."""

    async def start(**options: object) -> RunningGateway:
        return await start_gateway(
            **{
                "verifiers": [verifier.address],
                "http_listen": "127.0.0.1:0",
                "tokenizer": chat_folder,
                "draft_wait": "adaptive",
                **options,
            }
        )

    return start


@pytest.fixture
def texts(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The tokens of a text."""
    return tokenizer.encode
