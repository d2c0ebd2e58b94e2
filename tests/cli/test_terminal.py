"""Text of servers cannot steer the terminal; a long wait is shown there, and leaves nothing."""

import os
import socket
import sys

import pytest

from tandem.cli import main
from tandem.cli.terminal import waiting_for
from tests.cli.pseudo_terminal import pseudo_terminal


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
