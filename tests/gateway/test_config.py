"""The configuration of `python -m gateway`, and the errors of invalid values."""

from pathlib import Path

import pytest

from gateway.config import SERVICE, GatewayConfig
from gateway.requests.drafting_policy import TANDEM
from servicekit.config import ConfigError, list_options, parse_config


def parse(*argv: str, **environ: str) -> GatewayConfig:
    return parse_config(GatewayConfig, service=SERVICE, argv=argv, environ=environ)


def test_the_defaults_are_the_documented_ones() -> None:
    config = parse("--verifiers", "127.0.0.1:50052")
    assert config.server.listen == "127.0.0.1:50050"
    assert config.server.metrics_listen == "127.0.0.1:9100"
    assert config.http_listen == "127.0.0.1:8000"
    assert config.draft_wait == "adaptive"
    assert (config.hint_tokens, config.num_speculative_tokens) == (64, None)
    assert config.request_defaults().drafting == TANDEM
    assert (TANDEM.tie, TANDEM.tokens_per_match) == ("longest", 2)
    assert (TANDEM.min_ngram, TANDEM.max_ngram) == (1, 5)
    assert (TANDEM.overlap, TANDEM.algorithm) == ("disjoint", "index")
    assert config.drafters == []


def test_flags_variables_and_lists_are_read() -> None:
    config = parse(
        "--verifiers",
        "a:1,b:2",
        "--drafters=c:3",
        "--tokenizer",
        "model,other",
        "--max-prompt-tokens",
        "100",
        "--num-speculative-tokens",
        "3",
        "--http-listen",
        "",
        TANDEM_GATEWAY_DRAFT_WAIT="never",
        TANDEM_GATEWAY_HINT_TOKENS="2",
    )
    assert config.verifiers == ["a:1", "b:2"]
    assert config.drafters == ["c:3"]
    assert config.tokenizer == [Path("model"), Path("other")]
    assert config.http_listen is None
    assert (config.draft_wait, config.hint_tokens) == ("never", 2)
    assert config.request_defaults().max_prompt_tokens == 100
    assert config.request_defaults().drafting.num_speculative_tokens == 3


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


def test_every_option_is_described() -> None:
    assert all(option.description for option in list_options(GatewayConfig, service=SERVICE))


def test_no_tokenizer_may_be_said_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("verifiers: [127.0.0.1:1]\ntokenizer: null\n")
    assert parse("--config", str(file)).tokenizer == []
