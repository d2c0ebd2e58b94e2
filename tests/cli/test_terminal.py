"""Text of servers cannot steer the terminal."""

import pytest

from tandem.cli.terminal import report


def test_a_report_is_one_line_without_control_codes(capsys: pytest.CaptureFixture[str]) -> None:
    report("bench", "a server\r\nsaid\x1b[2J\x9b2J\x07")
    assert capsys.readouterr().err == "tandem bench: a server said\\x1b[2J\\x9b2J\\x07\n"
