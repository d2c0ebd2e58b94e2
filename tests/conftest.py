"""What holds for every test."""

import signal


def pytest_configure() -> None:
    """Takes SIGINT as a terminal gives it.

    A job that a shell starts in the background has it ignored, and so would every process that a
    test starts and interrupts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
