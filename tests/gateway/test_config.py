"""The configuration of `python -m gateway`, and the errors of invalid values."""

from pathlib import Path

import pytest

from gateway.config import SERVICE, GatewayConfig
from servicekit.config import ConfigError, parse_config


def parse(*argv: str, **environ: str) -> GatewayConfig:
    return parse_config(GatewayConfig, service=SERVICE, argv=argv, environ=environ)


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        ((), "--verifiers"),
        (("--verifiers", ""), "--verifiers"),
        (("--verifiers", "a:1,a:1"), "--verifiers"),
        (("--verifiers", "a:1,nowhere"), "--verifiers"),
        (("--verifiers", "http://127.0.0.1:50052"), "--verifiers"),
        (("--verifiers", "127.0.0.1:99999"), "--verifiers"),
        (("--verifiers", "a:1", "--draft-wait", "sometimes"), "--draft-wait"),
        (("--verifiers", "a:1", "--hint-tokens", "0"), "--hint-tokens"),
        (("--verifiers", "a:1", "--http-listen", "nowhere"), "--http-listen"),
        *(
            (("--verifiers", "a:1", "--http-allowed-origins", origins), "--http-allowed-origins")
            for origins in (
                "chat.example",
                "https://chat.example/",
                "https://chat.example/app",
                "https://chat.example:443",
                "http://chat.example:80",
                "https://Chat.example",
                "https://*.chat.example",
                "https://user@chat.example",
                "http://ok.example,null",
                "*,https://chat.example",
            )
        ),
        (("--verifiers", "a:1", "--drafters", "b:1,nowhere"), "--drafters"),
        (("--verifiers", "a:1", "--drafters", "b:1,b:1"), "--drafters"),
        (("--verifiers", "a:1", "--drafters", f"{'b' * 256}:1"), "--drafters"),
        (("--verifiers", "a:1", "--max-concurrent-requests", "0"), "--max-concurrent-requests"),
    ],
)
def test_an_invalid_value_names_its_flag(argv: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "origins",
    [
        "*",
        "https://chat.example,http://localhost:3000,http://[::1]:3000",
        "chrome-extension://abcdefgh,app://obsidian.md,safari-web-extension://1A2B-3C",
    ],
)
def test_origins_are_those_that_browsers_send(origins: str) -> None:
    config = parse("--verifiers", "a:1", "--http-allowed-origins", origins)
    assert config.http_allowed_origins == origins.split(",")


def test_no_tokenizer_may_be_said_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("verifiers: [127.0.0.1:1]\ntokenizer: null\n")
    assert parse("--config", str(file)).tokenizer == []
