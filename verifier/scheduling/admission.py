"""Which waiting sequences begin to run.

In order, a sequence is admitted when there are blocks for its next chunk beside the blocks that
running sequences need now; nothing is reserved for later growth. While one before it computes the
same prompt, it waits, to share the blocks; those behind it are admitted as far as they leave it its
place and its blocks. A preempted sequence is admitted again when there is room for it and for all
running sequences to grow. A sequence of a tenant that holds more than its share is preempted when
it is another's turn who holds less, one in some steps.
"""

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from verifier.scheduling.prefill_order import num_missing_tokens
from verifier.scheduling.running_set import RunningSet, num_held_blocks
from verifier.scheduling.sequence import Sequence
from verifier.scheduling.turns import Line, place

# Blocks of waiting sequences after which the cache is asked for no more of them in one call of
# `admit`: asking for many takes milliseconds, in which no stream runs.
_MAX_LOOKED_UP_BLOCKS = 8192

# While a waiting sequence has no room, one in so many calls of `admit` asks the cache for its
# prefix, which others may have computed meanwhile.
_CALLS_PER_LOOK_UP = 16

# Between two sequences that make way for others' turns.
_STEPS_PER_WAY = 8


@dataclass(slots=True)
class _LookUp:
    """A waiting sequence, and what the cache has of it.

    Attributes:
        num_found: the cached blocks of its prefix.
        num_idle: those of them that no sequence holds.
        prefix_source: the running sequence that computes its prefix for it. None: there is none.
        num_calls: of `admit` since they were looked up.
    """

    sequence: Sequence
    num_found: int
    num_idle: int
    prefix_source: Sequence | None
    num_calls: int = 0


class Admission:
    """Owned by the scheduler."""

    def __init__(
        self,
        running: RunningSet,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        growth_tokens: int,
    ) -> None:
        """Args:
        growth_tokens: that each running sequence must have room for when a preempted one is
            readmitted.
        """
        self._running = running
        self._turns = running.turns
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._growth_tokens = growth_tokens
        # The waiting sequences that the last `admit` has looked up: those that wait for a prefix,
        # and the one that had no room.
        self._look_ups: dict[Sequence, _LookUp] = {}
        # Sequences that `admit` will return; kept here in case it raises and is called again.
        self._opened: list[Sequence] = []
        # Steps so far, and the first one in which a running sequence may make way again.
        self.num_steps = 0
        self._next_way = 0

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences to running, in order, while there is room for them and for those
        before them that wait for a prefix.

        Returns:
            Sequences that run for the first time.
        """
        running = self._running
        self._enter_computed_blocks()
        known, self._look_ups = self._look_ups, {}
        # Those that wait for a prefix; others were next while they did.
        sharing: list[_LookUp] = []
        num_needed = num_looked_up = 0
        if self._turns.num_sequences and len(running.sequences) < self._max_num_seqs:
            # By the running ones and by `sharing`; kept up to date as sequences are admitted.
            num_needed = self._num_blocks_needed(sharing)
        may_start = len(running.sequences) < self._max_num_seqs or self._turns.has_several
        line = self._turns.line() if self._turns.num_sequences and may_start else Line(())
        made_way = False
        while (first := line.first()) is not None:
            sequence = running.current = first
            sequence.turn = self._turns.next_turn(sequence)
            if len(sharing) >= self._max_num_seqs - len(running.sequences):
                if made_way or not self._make_way(sequence, self._max_num_seqs, _one_place):
                    break
                made_way = True
                num_needed = self._num_blocks_needed(sharing)
            look_up = known.get(sequence)
            if look_up is not None:
                look_up.num_calls += 1
            if look_up is None or not self._waits_as_before(look_up, sharing, num_needed):
                if num_looked_up >= _MAX_LOOKED_UP_BLOCKS:
                    break
                found = running.find_cached(sequence)
                num_looked_up += len(sequence.block_digests)
                look_up = self._look_up(sequence, found)
                if look_up.prefix_source is None and self._has_room(look_up, sharing, num_needed):
                    running.start(sequence, found)
                    num_needed += running.num_blocks_missing(sequence)
                    if not sequence.is_preempted:
                        self._count_look_up(sequence)
                        self._opened.append(sequence)
                    if made_way:
                        break
                    line.go_on(has_started=True)
                    continue
            self._look_ups[sequence] = known[sequence] = look_up
            if look_up.prefix_source is None:
                num_blocks = running.block_pool.num_blocks
                if made_way or not self._make_way(sequence, num_blocks, num_held_blocks):
                    break
                made_way = True
                num_needed = self._num_blocks_needed(sharing)
                continue
            sharing.append(look_up)
            num_needed += self._num_blocks_to_start(look_up)
            if made_way:
                break
            line.go_on(has_started=False)
        running.current = None
        opened, self._opened = self._opened, []
        return opened

    def _enter_computed_blocks(self) -> None:
        """Enters into the prefix cache what running sequences have computed."""
        running = self._running
        has_states = running.states is not None
        for sequence in running.sequences:
            num_entered_tokens = sequence.num_entered_blocks * running.block_size
            if (
                has_states
                or sequence.num_computed_tokens - num_entered_tokens >= running.block_size
            ):
                running.current = sequence
                running.settle(sequence)

    def _make_way(self, waiting: Sequence, room: int, size: Callable[[Sequence], int]) -> bool:
        """Preempts a sequence for one that is next but has no place or no blocks, if its tenant
        holds less than its share and another more. Not again in the next steps: whoever makes way
        is computed again, as far as its blocks do not stay cached.
        """
        if not self._turns.has_several or self.num_steps < self._next_way:
            return False
        sequences = self._running.sequences
        sequence = self._turns.find_over_share(waiting, sequences, room=room, size=size)
        if sequence is None:
            return False
        self._next_way = self.num_steps + _STEPS_PER_WAY
        self._running.preempt(sequence)
        return True

    def _look_up(self, sequence: Sequence, found: list[int]) -> _LookUp:
        return _LookUp(
            sequence,
            len(found),
            sum(map(self._running.block_pool.cache.is_idle, found)),
            self._find_prefix_source(sequence, len(found)),
        )

    def _find_prefix_source(self, sequence: Sequence, num_found: int) -> Sequence | None:
        """The running sequence before a waiting one in order that will compute the first block of
        its prefix that is not cached. What both have in common would otherwise be computed twice,
        and take twice the blocks.

        Of two prompts, the source is computed first, so the waiting one loses a part of a step at
        most; a short one, which could overtake, some steps in which the first prompt of its
        priority computes what both have in common. Where a long prompt is not that first one, a
        short one does not wait for it, and computes that itself. A sequence with rows to score is
        no source: it may leave budget to those behind it in every step.
        """
        running_set = self._running
        num_cacheable = sequence.max_cached_tokens // running_set.block_size
        if not running_set.has_prefix_cache or num_found >= num_cacheable:
            return None
        if running_set.states is not None:
            return self._find_state_source(sequence, num_found, num_cacheable)
        digest = sequence.block_digests[num_found]
        may_overtake = self._may_overtake(sequence, num_found)
        first: Sequence | None = None
        num_before = bisect.bisect(running_set.sequences, place(sequence), key=place)
        for running in itertools.islice(running_set.sequences, num_before):
            if not running.is_prefilling:
                continue
            if running.priority == sequence.priority:
                first = first or running
            digests = running.block_digests
            if len(digests) == num_found < len(running.token_ids) // running_set.block_size:
                running_set.extend_digests(running, num_found + 1)
            is_ahead = running.num_entered_blocks <= num_found < len(digests)
            if not is_ahead or digests[num_found] != digest or running.rows_to_score:
                continue
            is_long = num_missing_tokens(running) > self._max_num_batched_tokens // 2
            is_behind = running.priority == sequence.priority and running is not first
            if not (may_overtake and is_long and is_behind):
                return running
        return None

    def _find_state_source(
        self, sequence: Sequence, num_found: int, num_cacheable: int
    ) -> Sequence | None:
        """As `_find_prefix_source`, where the model has recurrent states: who has yet to compute
        the end of what both have in common takes a snapshot there.
        """
        running_set = self._running
        assert running_set.states is not None
        may_overtake = self._may_overtake(sequence, num_found)
        first: Sequence | None = None
        num_before = bisect.bisect(running_set.sequences, place(sequence), key=place)
        for running in itertools.islice(running_set.sequences, num_before):
            if not running.is_prefilling or running.rows_to_score or running.states is None:
                continue
            if running.priority == sequence.priority:
                first = first or running
            num_common = running_set.num_common_blocks(running, sequence, num_cacheable)
            num_tokens = num_common * running_set.block_size
            if num_common <= num_found or running.num_computed_tokens >= num_tokens:
                continue
            is_long = num_missing_tokens(running) > self._max_num_batched_tokens // 2
            is_behind = running.priority == sequence.priority and running is not first
            if not (may_overtake and is_long and is_behind):
                running_set.states.request(running.states, num_tokens)
                return running
        return None

    def _may_overtake(self, sequence: Sequence, num_found: int) -> bool:
        """Whether a waiting sequence, of whose blocks so many are cached, is short enough to
        overtake prompts of its priority.
        """
        num_missing = len(sequence.token_ids) - num_found * self._running.block_size
        return num_missing <= self._max_num_batched_tokens // 2

    def _waits_as_before(self, look_up: _LookUp, sharing: list[_LookUp], num_needed: int) -> bool:
        """Whether a waiting sequence has no room by what was found in the cache last; that is found
        anew now and then. Or whether another still computes the prefix that it waits for.
        """
        if (source := look_up.prefix_source) is not None:
            if not (source.is_running and source.is_prefilling):
                return False
            # A long prompt is not looked up in every step.
            is_passed = source.num_entered_blocks > look_up.num_found
            return not (is_passed and self._may_overtake(look_up.sequence, look_up.num_found))
        if look_up.num_calls % _CALLS_PER_LOOK_UP == 0:
            return False
        return not self._has_room(look_up, sharing, num_needed)

    def _has_room(self, look_up: _LookUp, sharing: list[_LookUp], num_needed: int) -> bool:
        """Whether there are blocks for a waiting sequence's next chunk, beside those that running
        sequences need now, and those before it that wait for a prefix: `num_needed`.

        A preempted one needs room for all sequences to grow, so that it makes progress before it is
        preempted again.
        """
        states = self._running.states
        if states is not None and not states.has_room:
            return False
        growth_tokens = 0
        if look_up.sequence.is_preempted:
            num_cached = look_up.num_found * self._running.block_size
            num_missing = len(look_up.sequence.token_ids) - num_cached
            # While it is recomputed, the others grow by one token per step.
            growth_tokens = self._growth_tokens + num_missing // self._max_num_batched_tokens
            num_needed = self._num_blocks_needed(sharing, growth_tokens)
        num_needed += self._num_blocks_to_start(look_up, growth_tokens)
        return num_needed <= self._running.block_pool.num_available

    def _num_blocks_needed(self, sharing: list[_LookUp], growth_tokens: int = 0) -> int:
        """Available blocks that running sequences, and those that wait for a prefix, need now."""
        num_blocks = sum(self._num_blocks_to_start(each, growth_tokens) for each in sharing)
        return num_blocks + sum(
            self._running.num_blocks_missing(running, growth_tokens)
            for running in self._running.sequences
        )

    def _num_blocks_to_start(self, look_up: _LookUp, growth_tokens: int = 0) -> int:
        """Available blocks that a waiting sequence takes: for its next chunk, or for all its tokens
        and growth, if it was preempted.
        """
        running = self._running
        num_blocks = running.num_blocks_with_growth(look_up.sequence, 1 + growth_tokens)
        if not look_up.sequence.is_preempted:
            chunk_end = look_up.num_found * running.block_size + self._max_num_batched_tokens
            num_blocks = min(num_blocks, running.num_blocks_for(chunk_end))
        return num_blocks + look_up.num_idle - look_up.num_found

    def _count_look_up(self, sequence: Sequence) -> None:
        running = self._running
        sequence.num_cached_tokens = sequence.num_computed_tokens
        if running.has_prefix_cache and sequence.max_cached_tokens:
            running.counts.num_prefix_cache_queries += len(sequence.token_ids)
            running.counts.num_prefix_cache_hits += sequence.num_cached_tokens


def _one_place(sequence: Sequence) -> int:
    """What a running sequence holds of `max_num_seqs`."""
    return 1
