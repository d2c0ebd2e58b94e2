"""The drafter's configuration: defaults, and values that are refused."""

import pytest

from drafter.config import DrafterConfig
from servicekit.config import ConfigError, load_config, parse_config


def parse(*argv: str) -> DrafterConfig:
    return parse_config(DrafterConfig, service="drafter", argv=argv, environ={})


def test_defaults_listen_on_loopback_only() -> None:
    config = parse()
    assert config.server.listen == "127.0.0.1:50051"
    assert config.server.metrics_listen == "127.0.0.1:9101"


def test_flags_become_the_bounds_of_the_store() -> None:
    limits = parse("--max-history-bytes=67108864").store_limits()
    assert (limits.max_sequences, limits.max_history_bytes) == (16_384, 64 << 20)
    assert (limits.max_sequence_bytes, limits.idle_ttl_s) == (32 << 20, 600)
    assert limits.stream_grace_s == 30


def test_flags_become_the_bounds_of_the_pools() -> None:
    config = parse("--max-pools-bytes=200000000", "--pool-ttl-s=60", "--snapshot-dir=/var/pools")
    limits = config.pool_limits()
    assert (limits.max_pool_bytes, limits.max_pools_bytes) == (64 << 20, 200_000_000)
    assert limits.pool_ttl_s == 60
    assert str(config.snapshot_dir) == "/var/pools"
    assert parse().snapshot_dir is None


def test_all_pools_must_have_room_for_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config(
            DrafterConfig, service="drafter", argv=["--max-pools-bytes=1000000"], environ={}
        )
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "--max-pools-bytes 1000000" in message


@pytest.mark.parametrize("flag", ["--pool-ttl-s=0", "--pool-ttl-s=inf"])
def test_bounds_that_nothing_fits_into_are_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(flag)
    assert error.value.key == flag.partition("=")[0]


def test_all_histories_must_have_room_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config(DrafterConfig, service="drafter", argv=["--max-history-bytes=1000"], environ={})
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "--max-history-bytes 1000" in message
