"""The ready line, written and read."""

import pytest

from tandem.ready_line import format_ready_line, parse_ready_line


def test_what_is_written_is_read_back() -> None:
    addresses = {"grpc": "127.0.0.1:50050", "http": "[::1]:8000"}
    line = format_ready_line(addresses)
    assert line == "ready grpc=127.0.0.1:50050 http=[::1]:8000"
    assert parse_ready_line(line + "\n") == addresses


@pytest.mark.parametrize(
    "line",
    ["", "\n", "ready", "ready http=a:1", "not ready grpc=a:1", "ready grpc", "already grpc=a:1"],
)
def test_other_lines_are_no_ready_lines(line: str) -> None:
    assert parse_ready_line(line) is None
