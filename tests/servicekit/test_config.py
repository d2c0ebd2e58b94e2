"""Configuration: where values come from, which wins, and what an error says."""

import enum
import os
import threading
from pathlib import Path
from typing import Literal

import pydantic
import pytest
import structlog

import servicekit.yaml_file
from servicekit.config import (
    ChannelOptions,
    ConfigError,
    ServerOptions,
    list_options,
    load_config,
    parse_config,
    warn_of_unknown_variables,
)
from servicekit.logs import get_logger


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Limits(pydantic.BaseModel, frozen=True, extra="forbid"):
    max_length: int = pydantic.Field(default=10, ge=1, description="Longest thing, in 100 % feet.")
    min_length: int = 1

    @pydantic.model_validator(mode="after")
    def _is_ordered(self) -> "Limits":
        if self.min_length > self.max_length:
            raise ValueError("--min-length is above --max-length")
        return self


class ThingOptions(pydantic.BaseModel, frozen=True, extra="forbid"):
    server: ServerOptions = ServerOptions(listen="127.0.0.1:7", drain_timeout_s=3)
    channel: ChannelOptions = ChannelOptions()
    limits: Limits = Limits()
    name: str = "nobody"
    model: Path | None = None
    ratio: float = 0.5
    eager: bool = False
    careful: bool = True
    peers: tuple[str, ...] = ("a:1",)
    ports: list[int] = []
    colour: Colour = Colour.RED
    speed: Literal["slow", "fast"] = "slow"


def parse(
    *argv: str,
    environ: dict[str, str] | None = None,
    model: type[pydantic.BaseModel] = ThingOptions,
) -> "ThingOptions":
    config = parse_config(model, service="thing", argv=argv, environ=environ or {})
    assert isinstance(config, model)
    return config  # type: ignore[return-value]


def error_of(*argv: str, environ: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, environ=environ)
    return caught.value


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "thing.yaml"


def test_every_level_of_precedence(yaml_file: Path) -> None:
    sources = {
        "flag": (["--name", "flag"], {}, ""),
        "environment": ([], {"TANDEM_THING_NAME": "environment"}, ""),
        "file": ([], {}, "name: file"),
    }
    ranking = ["flag", "environment", "file"]
    for mask in range(8):
        present = [name for bit, name in enumerate(ranking) if mask >> bit & 1]
        yaml_file.write_text("".join(sources[name][2] for name in present))
        argv = ["--config", str(yaml_file), *(a for name in present for a in sources[name][0])]
        environ = {k: v for name in present for k, v in sources[name][1].items()}
        assert parse(*argv, environ=environ).name == (present[0] if present else "nobody")


def test_the_enclosing_models_default_wins_over_the_nested_fields_own() -> None:
    server = parse("--metrics-listen", "127.0.0.1:9").server
    assert server.listen == "127.0.0.1:7"
    assert server.drain_timeout_s == 3
    assert server.metrics_listen == "127.0.0.1:9"
    assert server.log_level == ServerOptions().log_level


def test_the_file_may_be_named_by_the_environment_and_the_flag_wins(
    yaml_file: Path, tmp_path: Path
) -> None:
    yaml_file.write_text("name: one")
    other = tmp_path / "other.yaml"
    other.write_text("name: two")
    environ = {"TANDEM_THING_CONFIG": str(other)}
    assert parse(environ=environ).name == "two"
    assert parse("--config", str(yaml_file), environ=environ).name == "one"


def test_nested_models_share_one_namespace_in_every_source(yaml_file: Path) -> None:
    yaml_file.write_text("max_length: 30\nlog_level: error")
    config = parse(
        "--listen=[::1]:5", "--config", str(yaml_file),
        environ={"TANDEM_THING_MIN_LENGTH": "20", "TANDEM_THING_PEER_TLS_CA": "ca.pem"},
    )  # fmt: skip
    assert config.server.listen == "[::1]:5"
    assert config.server.log_level == "error"
    assert config.limits == Limits(max_length=30, min_length=20)
    assert config.channel.peer_tls_ca == Path("ca.pem")


def test_every_type_is_read_from_text_and_from_yaml(yaml_file: Path) -> None:
    expected = ThingOptions(
        name="x", model=Path("m"), ratio=0.25, eager=True, careful=False, peers=("a:1", "b:2"),
        ports=[1, 2], colour=Colour.BLUE, speed="fast",
    )  # fmt: skip
    by_flag = parse(
        "--name", "x", "--model", "m", "--ratio", "0.25", "--eager", "--no-careful",
        "--peers", "a:1, b:2,", "--ports", "1,2", "--colour", "blue", "--speed", "fast",
    )  # fmt: skip
    assert by_flag == expected
    text = {
        "NAME": "x", "MODEL": "m", "RATIO": "0.25", "EAGER": "true", "CAREFUL": "0",
        "PEERS": "a:1,b:2", "PORTS": "1,2", "COLOUR": "blue", "SPEED": "fast",
    }  # fmt: skip
    assert parse(environ={f"TANDEM_THING_{key}": value for key, value in text.items()}) == expected
    yaml_file.write_text(
        "{name: x, model: m, ratio: 0.25, eager: true, careful: no, peers: ['a:1', 'b:2'],"
        " ports: [1, 2], colour: blue, speed: fast}"
    )
    assert parse("--config", str(yaml_file)) == expected
    yaml_file.write_text("peers: a:1,b:2")
    assert parse("--config", str(yaml_file)).peers == ("a:1", "b:2")


def test_an_empty_value_means_absent_or_empty() -> None:
    environ = {"TANDEM_THING_MODEL": "m", "TANDEM_THING_PEERS": "a:1"}
    config = parse("--model", "", "--peers=", "--name=", environ=environ)
    assert config.model is None
    assert config.peers == ()
    assert config.name == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-length", "many"], "--max-length: 'many'"),
        (["--max-length", "0"], "--max-length: '0'"),
        (["--max-length", "1.5"], "--max-length: '1.5'"),
        (["--max-length"], "--max-length: expected one argument"),
        (["--ratio", "half"], "--ratio: 'half'"),
        (["--ports", "1,x"], "--ports: 'x'"),
        (["--colour", "green"], "--colour: 'green'"),
        (["--speed", "warp"], "--speed: 'warp'"),
        (["--listen", "nowhere"], "--listen: 'nowhere' is not HOST:PORT"),
        (["--metrics-listen", "x"], "--metrics-listen: 'x' is not HOST:PORT"),
        (["--drain-timeout-s", "inf"], "--drain-timeout-s: 'inf'"),
        (["--eager=yes"], "--eager/--no-eager: ignored explicit argument 'yes'"),
        (["--lenght", "4"], "unrecognized arguments: --lenght"),
        (["--max-len", "4"], "unrecognized arguments: --max-len"),
        (["--server", "x"], "unrecognized arguments: --server"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_bad_flag_is_named(argv: list[str], message: str) -> None:
    assert message in str(error_of(*argv))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MAX_LENGTH", "many"), ("RATIO", ""), ("EAGER", "perhaps"), ("PORTS", "1;2"),
     ("COLOUR", "green"), ("LISTEN", "host"), ("LOG_LEVEL", "loud")],
)  # fmt: skip
def test_a_bad_variable_is_named(variable: str, value: str) -> None:
    error = error_of(environ={f"TANDEM_THING_{variable}": value})
    assert error.key == f"TANDEM_THING_{variable}"
    assert repr(value.partition(";")[0])[:-1] in error.message


@pytest.mark.parametrize(
    ("line", "key"),
    [("max_length: many", "max_length"), ("max_length: yes", "max_length"), ("name: 4", "name"),
     ("name: {a: b}", "name"), ("ratio: [1]", "ratio"), ("eager: perhaps", "eager"),
     ("peers: 5", "peers"), ("ports: [1, x]", "ports"), ("listen: host", "listen"),
     ("max_length:", "max_length"), ("max-length: 4", "max-length"), ("server: {}", "server"),
     ("colour_: red", "colour_"), ("7: 7", "7")],
)  # fmt: skip
def test_a_bad_yaml_key_is_named_with_its_file(yaml_file: Path, line: str, key: str) -> None:
    yaml_file.write_text(f"speed: fast\n{line}\n")
    assert error_of("--config", str(yaml_file)).key == f"{yaml_file}: {key}"


def test_a_field_without_a_flag_is_no_key_of_any_source(yaml_file: Path) -> None:
    assert "unrecognized arguments: --request-timeout-s" in str(
        error_of("--request-timeout-s", "1")
    )
    yaml_file.write_text("request_timeout_s: 1")
    assert error_of("--config", str(yaml_file)).message == "unknown key"
    assert parse(environ={"TANDEM_THING_REQUEST_TIMEOUT_S": "1"}) == ThingOptions()


@pytest.mark.parametrize(
    ("content", "message"),
    [("name: a\nname: b", "line 2: name is given twice"), ("- name", "holds a list"),
     ("name: [", "line 1"), ("? [a]\n: b", "unhashable key"), ("name: \x00", "special characters"),
     # PyYAML's own constructors raise these.
     ("name: !!bool x", "KeyError"), ('name: !!int ""', "IndexError"),
     ('name: !!timestamp "2027-01"', "AttributeError"), ("name: !!map [a]", "TypeError"),
     ("name: 2027-13-01", "month"), ("[" * 5000, "RecursionError")],
)  # fmt: skip
def test_a_file_that_is_not_a_configuration_is_refused(
    yaml_file: Path, content: str, message: str
) -> None:
    yaml_file.write_text(content)
    error = error_of("--config", str(yaml_file))
    assert error.key == "--config"
    assert str(yaml_file) in error.message
    assert message in error.message


def test_a_missing_file_is_named_with_the_key_that_names_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    assert error_of("--config", missing).key == "--config"
    error = error_of(environ={"TANDEM_THING_CONFIG": missing})
    assert error.key == "TANDEM_THING_CONFIG"
    assert missing in error.message
    assert "No such file" in error.message


# Such as a shell's <(...).
def test_a_file_may_be_a_pipe() -> None:
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as pipe:
            # More than fits into a pipe: the reader has to wait.
            pipe.write(b"# a comment\n" * 100_000 + b"name: piped\n")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert parse("--config", f"/dev/fd/{reading}").name == "piped"
    finally:
        os.close(reading)
        writer.join()


def test_a_pipe_that_nobody_writes_to_is_refused(yaml_file: Path) -> None:
    os.mkfifo(yaml_file)
    error = error_of("--config", str(yaml_file))
    assert (error.key, error.message) == ("--config", f"{yaml_file}: is a pipe without content")


def test_a_file_without_end_is_refused(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicekit.yaml_file, "_MAX_FILE_BYTES", 1 << 20)
    yaml_file.symlink_to("/dev/zero")
    error = error_of("--config", str(yaml_file))
    assert (error.key, error.message) == ("--config", f"{yaml_file}: has more than 1 MiB")


def test_an_error_names_the_source_that_won() -> None:
    error = error_of("--max-length", "x", environ={"TANDEM_THING_MAX_LENGTH": "y"})
    assert (error.key, "'x'" in error.message) == ("--max-length", True)
    assert parse("--max-length", "3", environ={"TANDEM_THING_MAX_LENGTH": "y"}).limits.max_length


def test_keys_that_contradict_each_other_have_the_models_own_message() -> None:
    error = error_of("--min-length", "20")
    assert str(error) == "--min-length is above --max-length"


def test_unknown_variables_are_logged_without_their_values_save_those_of_kubernetes() -> None:
    of_kubernetes = {
        "TANDEM_THING_SERVICE_HOST": "10.0.0.1",
        "TANDEM_THING_SERVICE_PORT_GRPC": "50050",
        "TANDEM_THING_PORT": "tcp://10.0.0.1:50050",
        "TANDEM_THING_PORT_50050_TCP_ADDR": "10.0.0.1",
    }
    known = {
        "TANDEM_THING_NAME": "x",
        "TANDEM_THING_LISTEN": "x",
        "TANDEM_THING_CONFIG": "",
    }
    of_others = {"TANDEM_X": "1", "TANDEM_THINGS_NAME": "x", "THING_NAME": "x"}
    misspelt = {"TANDEM_THING_PEER": "secret", "TANDEM_THING_PORTS_": "secret"}
    with structlog.testing.capture_logs() as lines:
        warn_of_unknown_variables(
            ThingOptions,
            service="thing",
            logger=get_logger("thing"),
            environ=of_kubernetes | known | of_others | misspelt,
        )
    assert lines == [
        {
            "log_level": "warning",
            "event": "unknown_variable",
            "logger_name": "thing",
            "variable": name,
        }
        for name in sorted(misspelt)
    ]


class OptionsWithoutDefault(pydantic.BaseModel, frozen=True, extra="forbid"):
    limits: Limits = Limits()
    model: Path


def test_a_value_without_default_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(OptionsWithoutDefault, service="thing", argv=[], environ={})
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == "thing: error: --model: is required\n"
    assert captured.out == ""
    assert load_config(
        OptionsWithoutDefault, service="thing", argv=["--model", "m"], environ={}
    ).model == Path("m")


def test_an_error_is_one_line_whatever_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(ThingOptions, service="thing", argv=["--a\nb"], environ={})
    assert capsys.readouterr().err == "thing: error: unrecognized arguments: --a b\n"


def test_help_lists_flag_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(ThingOptions, service="thing", argv=["--help"], environ={})
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-length int Longest thing, in 100 % feet. (default: 10) [env: TANDEM" in text
    assert "--eager, --no-eager" in text
    for option in list_options(ThingOptions, service="thing"):
        assert option.flag in text
        assert option.variable in text
    assert "default: 127.0.0.1:7" in text  # the enclosing model's, not the nested field's
    assert "--speed {slow,fast}" in text
    assert "--config Path" in text


def test_every_option_of_the_package_has_a_description() -> None:
    for model in (ServerOptions, ChannelOptions):
        for option in list_options(model, service="thing"):
            assert option.description.endswith("."), option.name
