"""Reconnecting: how long the pauses are."""

from gateway.peers.backoff import Backoff


def test_pauses_double_up_to_a_bound() -> None:
    backoff = Backoff(random_fraction=lambda: 0.0)
    pauses = [backoff.next_pause_s(0.0) for _ in range(10)]
    assert pauses[:4] == [0.05, 0.1, 0.2, 0.4]
    assert pauses[-1] == 2.0


def test_chance_shortens_a_pause_by_up_to_a_half() -> None:
    assert Backoff(random_fraction=lambda: 1.0).next_pause_s(0.0) == 0.025


def test_a_stream_that_lasted_starts_over_and_one_that_broke_at_once_does_not() -> None:
    backoff = Backoff(random_fraction=lambda: 0.0)
    for _ in range(5):
        backoff.next_pause_s(0.0)
    assert backoff.next_pause_s(0.1) > 1
    assert backoff.next_pause_s(60.0) == 0.05
