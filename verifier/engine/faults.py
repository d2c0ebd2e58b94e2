"""Where the engine meets faults of its own that it survives, and how they are counted."""

import enum


class Fault(enum.StrEnum):
    """During what; the label of `tandem_verifier_internal_errors`."""

    COMMAND = "command"  # handling one command
    SCHEDULE = "schedule"  # admitting one sequence, or giving it its part in a step
    VERIFY = "verify"  # sampling one sequence's tokens
    SCORE = "score"  # scoring one sequence's rows
    COMMIT = "commit"  # moving one sequence forward
    PUBLISH = "publish"  # handing one session its events, or writing one of them
    OBSERVE = "observe"  # telling metrics and tests
