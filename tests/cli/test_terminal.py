"""Text of servers cannot steer the terminal; a long wait is shown there, and leaves nothing."""

import os
import socket
import sys

import pytest

from tandem.cli import main
from tandem.cli.terminal import has_colour, is_live, report, waiting_for
from tests.cli.pseudo_terminal import pseudo_terminal


def test_a_report_is_one_line_without_control_codes(capsys: pytest.CaptureFixture[str]) -> None:
    report("bench", "a server\r\nsaid\x1b[2J\x9b2J\x07")
    assert capsys.readouterr().err == "tandem bench: a server said\\x1b[2J\\x9b2J\\x07\n"


def test_a_wait_is_shown_once_it_is_long_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with pseudo_terminal() as terminal:
        with os.fdopen(os.dup(terminal.descriptor), "w") as stderr:
            monkeypatch.setattr(sys, "stderr", stderr)
            with waiting_for("nothing", after_s=3600.0):
                pass
            assert terminal.shown == ""
            with waiting_for("the answer", after_s=0.01):
                terminal.wait_for("waiting for the answer")
            # The line is erased, and the cursor is shown again.
            terminal.wait_for(r"\x1b\[2K", r"\x1b\[\?25h")
        monkeypatch.undo()


def test_generate_shows_that_it_waits_for_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("tandem.cli.generate._PATIENCE_S", 0.01)
    with pseudo_terminal() as terminal, socket.create_server(("127.0.0.1", 0)) as server:
        with os.fdopen(os.dup(terminal.descriptor), "w") as stderr:
            monkeypatch.setattr(sys, "stderr", stderr)
            # Nobody answers: the client gives up.
            address = f"127.0.0.1:{server.getsockname()[1]}"
            server.close()
            assert main(["generate", "a", "--target", address]) == 1
            terminal.wait_for("waiting for the first token", "tandem generate: ")
        monkeypatch.undo()


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_without_a_terminal_a_wait_shows_nothing(
    term: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    with waiting_for("the answer"):
        pass
    assert capsys.readouterr().err == ""


def test_streams_that_are_closed_are_no_terminals_and_take_no_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python has None in their places."""
    monkeypatch.setattr(sys, "stderr", None)
    assert not is_live(None)
    assert not has_colour(None)
    report("generate", "lost")
