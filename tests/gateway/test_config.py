"""The configuration: what `python -m gateway` takes, and how its mistakes are named."""

from pathlib import Path

import pytest

from gateway.config import SERVICE, GatewayConfig
from servicekit.config import ConfigError, parse_config
from servicekit.config_keys import list_options


def parse(*argv: str, **environ: str) -> GatewayConfig:
    return parse_config(GatewayConfig, service=SERVICE, argv=argv, environ=environ)


def test_the_defaults_are_the_documented_ones() -> None:
    config = parse("--verifiers", "127.0.0.1:50052")
    assert config.server.listen == "127.0.0.1:50050"
    assert config.server.metrics_listen == "127.0.0.1:9100"
    assert config.http_listen == "127.0.0.1:8000"
    assert config.draft_wait == "adaptive"
    assert (config.hint_tokens, config.num_speculative_tokens) == (64, None)
    assert (config.tie, config.tokens_per_match) == ("longest", 2)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (2, 5)
    assert config.drafters == []


def test_flags_variables_and_lists_are_read() -> None:
    config = parse(
        "--verifiers",
        "a:1,b:2",
        "--drafters=c:3",
        "--tokenizer",
        "model",
        "--max-prompt-tokens",
        "100",
        "--http-listen",
        "",
        TANDEM_GATEWAY_DRAFT_WAIT="never",
        TANDEM_GATEWAY_HINT_TOKENS="2",
    )
    assert config.verifiers == ["a:1", "b:2"]
    assert config.drafters == ["c:3"]
    assert config.tokenizer == Path("model")
    assert config.http_listen is None
    assert (config.draft_wait, config.hint_tokens) == ("never", 2)
    assert config.request_defaults().max_prompt_tokens == 100


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        ((), "--verifiers"),
        (("--verifiers", ""), "--verifiers"),
        (("--verifiers", "a:1,a:1"), "--verifiers"),
        (("--verifiers", "a:1", "--draft-wait", "sometimes"), "--draft-wait"),
        (("--verifiers", "a:1", "--hint-tokens", "0"), "--hint-tokens"),
        (("--verifiers", "a:1", "--http-listen", "nowhere"), "--http-listen"),
        (("--verifiers", "a:1", "--max-concurrent-requests", "0"), "--max-concurrent-requests"),
    ],
)
def test_a_mistake_names_its_flag(argv: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert caught.value.key == key


def test_an_empty_range_of_ngrams_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prompt-lookup-min 6 is over --prompt-lookup-max 5"):
        parse("--verifiers", "a:1", "--prompt-lookup-min", "6")


def test_every_option_is_described() -> None:
    assert all(option.description for option in list_options(GatewayConfig, service=SERVICE))
