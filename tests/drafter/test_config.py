"""The drafter's configuration: defaults, and values that are refused."""

import pytest

from drafter.config import DrafterConfig
from servicekit.config import ConfigError, load_config, parse_config


def parse(*argv: str) -> DrafterConfig:
    return parse_config(DrafterConfig, service="drafter", argv=argv, environ={})


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
