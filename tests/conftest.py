"""What holds for every test."""

import signal

import hypothesis

# The same cases in every run, so that nobody's change fails for a case that it did not bring.
# `pytest --hypothesis-profile explore` looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.register_profile("explore", derandomize=False)
hypothesis.settings.load_profile("fixed")


def pytest_configure() -> None:
    """Takes SIGINT as a terminal gives it.

    A job that a shell starts in the background has it ignored, and so would every process that a
    test starts and interrupts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
