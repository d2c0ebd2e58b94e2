"""The phases of a step are ranges in a profile."""

import torch

from tests.verifier.running_engine import PATIENCE_S, StartEngine


def test_a_profile_of_the_engines_thread_names_the_phases_of_its_steps(
    start_engine: StartEngine,
) -> None:
    running = start_engine()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    running.engine.call(profile.start).result(PATIENCE_S)
    session = running.attach()
    session.wait_end(session.open([1, 2, 3], max_new_tokens=4))
    running.engine.call(profile.stop).result(PATIENCE_S)
    counts = {event.key: event.count for event in profile.key_averages()}
    phases = ("schedule", "lay_out", "forward", "verify", "commit", "publish")
    assert [counts.get(f"tandem.{phase}", 0) for phase in phases[1:]] == [4] * 5
    # The scheduler also runs when there is nothing to do.
    assert counts["tandem.schedule"] >= 4
