"""The sequences that one drafter may forget, but was not told so yet.

Those that feed no pool wait for the next batch, for some time at most: a message of their own costs
as much as a step of a small model, and a drafter is in no hurry to forget.
"""

import math
from collections.abc import Iterator

from tandem.values import Keep
from verifier.drafters.batches import MAX_DELTAS, MAX_REQUEST_BYTES, Release

RELEASE_DELAY_S = 0.05

# At most, in bytes: a release, which has the sequence's id twice if it feeds a pool.
_RELEASE_BYTES = 160
# Reserved for releases in each message that has some.
_MAX_RELEASES_BYTES = MAX_REQUEST_BYTES // 4


class Releases:
    """Owned by a feed; times are of the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._by_id: dict[str, Release] = {}
        # When they go in a batch of their own, as of the last `begin_delay`.
        self._due_s = math.inf

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[str]:
        """Their sequences' ids."""
        return iter(self._by_id)

    def add(self, release: Release) -> None:
        self._by_id[release.sequence_id] = release
        if release.keep is not Keep.NOTHING:
            # It feeds a pool, from which other sequences may draft now.
            self._due_s = -math.inf

    def forget(self, sequence_id: str) -> None:
        """Drops a release, if there is one."""
        self._by_id.pop(sequence_id, None)

    def clear(self) -> None:
        self._by_id.clear()

    def begin_delay(self, now_s: float) -> None:
        """From now on those that came since the last call are delayed."""
        self._due_s = min(self._due_s, now_s + RELEASE_DELAY_S) if self._by_id else math.inf

    def is_due(self, now_s: float) -> bool:
        """Whether they go in a batch of their own."""
        return now_s >= self._due_s

    def due_s(self, now_s: float) -> float:
        """How long until they are due; infinite if there are none."""
        return max(0.0, self._due_s - now_s) if self._by_id else math.inf

    def cut(self) -> tuple[list[Release], int]:
        """Removes the next releases; returns them and how many bytes are left for deltas."""
        releases: list[Release] = []
        if not self._by_id:
            return releases, MAX_REQUEST_BYTES
        room_bytes = _MAX_RELEASES_BYTES
        for release in self._by_id.values():
            room_bytes -= _RELEASE_BYTES
            if room_bytes < 0 or len(releases) == MAX_DELTAS:
                break
            releases.append(release)
        for release in releases:
            del self._by_id[release.sequence_id]
        return releases, MAX_REQUEST_BYTES - _MAX_RELEASES_BYTES
