"""What a verifier's messages say of its load; drills show what comes of it."""

from gateway.peers.verifier_load import VerifierLoad


def test_a_stall_does_not_make_the_next_one_tolerable() -> None:
    load = VerifierLoad()
    load.connect(1.0, "one")
    load.answer(2.0)
    load.step(num_sequences=3, num_own=1, step_s=0.01)
    assert (load.longest_step_s, load.num_others, load.last_progress_s) == (0.01, 2, 2.0)
    load.is_unresponsive = True
    load.step(num_sequences=3, num_own=1, step_s=9.0)
    assert load.longest_step_s == 0.01
    # The mean of its steps after a stall.
    load.report(num_sequences=3, num_own=1, num_steps=7, step_s=4.0)
    assert load.longest_step_s == 0.01


def test_before_any_step_the_mean_is_known() -> None:
    load = VerifierLoad()
    load.connect(1.0, "one")
    load.report(num_sequences=0, num_own=0, num_steps=7, step_s=0.02)
    assert load.longest_step_s == 0.02
    load.connect(2.0, "another process")
    assert load.longest_step_s == 0.0
