"""The prefix cache: which blocks are found, kept, evicted and never shared."""

import hashlib
import random
from typing import Any

import pytest

from tests.scripted_model import continue_by, hashed
from tests.verifier.running_engine import StartEngine
from tests.verifier.scheduling.scheduled_world import ScheduledWorld
from tests.verifier.scheduling.test_scheduler import make_scheduler
from tests.verifier.sequences import make_sequence
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.prefix_cache import extend_digests

TEXT = random.Random(1).choices(range(3), k=60)


def digests_of(token_ids: list[int], *, block_size: int = 4, cache_salt: str = "") -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(
        digests,
        token_ids,
        len(token_ids) // block_size,
        block_size=block_size,
        cache_salt=cache_salt,
    )
    return digests


def num_cached(world: ScheduledWorld, token_ids: list[int], **fields: object) -> int:
    """How many tokens of a prompt are cached when it is opened now; it runs to its end."""
    sequence = world.open(token_ids, 1, **fields)
    world.run_to_end()
    return sequence.num_cached_tokens


class TestDigests:
    def test_a_digest_depends_on_everything_before_it(self) -> None:
        base = digests_of(TEXT)
        for changed in range(len(TEXT)):
            text = [*TEXT[:changed], 7, *TEXT[changed + 1 :]]
            other = digests_of(text)
            first = changed // 4
            assert other[:first] == base[:first]
            assert not set(other[first:]) & set(base), "a later block did not notice"

    def test_salts_share_no_digest(self) -> None:
        salts = ["", "a", "b", "a\0", "0:/"]
        assert len({d for salt in salts for d in digests_of(TEXT, cache_salt=salt)}) == 5 * 15

    def test_token_ids_are_hashed_whole(self) -> None:
        assert digests_of([1, 0, 0, 0]) != digests_of([257, 0, 0, 0])
        assert digests_of([1, 0, 0, 0]) != digests_of([65537, 0, 0, 0])
        assert digests_of([2**32 - 1] * 4)


class TestFinding:
    @pytest.mark.parametrize(
        ("length", "expected"),
        [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (21, 20), (24, 20), (25, 24), (40, 24)],
    )
    def test_whole_blocks_are_found_and_never_the_last_token(
        self, length: int, expected: int
    ) -> None:
        world = ScheduledWorld(num_blocks=20)
        num_cached(world, TEXT[:26])
        assert num_cached(world, TEXT[:length]) == expected

    def test_output_is_found_too_but_no_rejected_draft(self) -> None:
        world = ScheduledWorld(num_blocks=20)
        prompt = TEXT[:6]
        sequence = world.open(prompt, 11)
        while sequence.remaining:
            world.hint(sequence, 1, 3)
            world.step()
            world.check()
        whole = prompt + continue_by(hashed, prompt, 11)
        # Of 17 tokens the last was never computed.
        assert num_cached(world, [*whole, 0, 0, 0, 0]) == 16
        wrong = [*whole[:7], (whole[7] + 1) % 3, *whole[8:]]
        assert num_cached(world, wrong) == 4

    def test_a_prefix_is_found_while_its_sequence_still_runs(self) -> None:
        world = ScheduledWorld(num_blocks=30)
        first = world.open(TEXT[:13], 20)
        world.step()
        second = world.open(TEXT[:13], 20)
        world.step()
        assert second.num_cached_tokens == 12
        assert second.block_table[:3] == first.block_table[:3], "not shared"
        assert second.block_table[3] != first.block_table[3]
        world.check()
        world.scheduler.finish(first)
        world.check()
        world.run_to_end()
        assert world.reported[second.sequence_id] == continue_by(hashed, TEXT[:13], 20)

    def test_equal_prompts_that_come_together_are_computed_once(self) -> None:
        world = ScheduledWorld(num_blocks=60)
        opened = [world.open(TEXT[:30], 4) for _ in range(3)]
        opened.append(world.open([*TEXT[:21], *TEXT], 4))
        num_computed = [sum(item.num_new_tokens for item in world.step()) for _ in range(2)]
        assert num_computed == [16, 14], "the others wait for the first"
        world.step()
        assert [sequence.num_cached_tokens for sequence in opened] == [0, 28, 28, 20]
        assert all(s.block_table[:7] == opened[0].block_table[:7] for s in opened[:3])
        world.check()
        world.run_to_end()
        for sequence in opened:
            prompt = sequence.token_ids[: sequence.prompt_length]
            assert world.reported[sequence.sequence_id] == continue_by(hashed, prompt, 4)

    def test_no_sequence_waits_for_one_after_it_or_for_one_that_is_scored(self) -> None:
        world = ScheduledWorld(num_blocks=60, max_scored_rows=4)
        scored = world.open(TEXT[:50], 4, rows_to_score=range(49))
        behind_it = world.open(TEXT[:49], 4)
        world.step()
        before_it = world.open(TEXT[:48], 4, priority=1)
        world.step()
        assert world.scheduler.running == [before_it, scored, behind_it]
        world.run_to_end()

    def test_other_salts_find_nothing(self) -> None:
        world = ScheduledWorld(num_blocks=20)
        num_cached(world, TEXT[:20], cache_salt="a")
        assert num_cached(world, TEXT[:20], cache_salt="b") == 0
        assert num_cached(world, TEXT[:20]) == 0
        assert num_cached(world, TEXT[:20], cache_salt="a") == 16

    def test_a_scored_prompt_uses_no_cached_block_but_is_cached(self) -> None:
        world = ScheduledWorld(num_blocks=20)
        num_cached(world, TEXT[:20])
        counts = world.scheduler.counts
        queries = counts.num_prefix_cache_queries
        assert num_cached(world, TEXT[:24], rows_to_score=range(24)) == 0
        assert counts.num_prefix_cache_queries == queries
        assert num_cached(world, TEXT[:24]) == 20
        assert num_cached(world, TEXT[:25]) == 24

    def test_nothing_is_cached_when_switched_off(self) -> None:
        world = ScheduledWorld(num_blocks=20, has_prefix_cache=False)
        num_cached(world, TEXT[:20])
        assert num_cached(world, TEXT[:20]) == 0
        assert world.scheduler.block_pool.num_free == 20
        assert world.scheduler.counts.num_prefix_cache_queries == 0


def test_a_long_prompt_is_hashed_little_further_than_it_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More would stop running streams, and be of no use before its blocks fill."""
    num_blocks = 500
    scheduler = make_scheduler(num_blocks=3 * num_blocks, max_num_batched_tokens=32)
    text = list(range(num_blocks * 4))
    first = make_sequence(token_ids=text)
    second = make_sequence(token_ids=[*text[:40], *reversed(text)])
    num_hashed = 0
    blake2b = hashlib.blake2b

    def counted(*args: Any, **fields: Any) -> Any:
        nonlocal num_hashed
        num_hashed += 1
        return blake2b(*args, **fields)

    monkeypatch.setattr(hashlib, "blake2b", counted)
    scheduler.add(first)
    scheduler.admit()
    assert num_hashed < 100
    scheduler.block_pool.extend(first.block_table, num_blocks)
    first.num_computed_tokens = len(text) - 1
    scheduler.finish(first)
    num_hashed = 0
    scheduler.add(second)
    scheduler.admit()
    assert second.num_cached_tokens == 40
    assert num_hashed < 100


class TestEviction:
    def test_the_least_recently_used_prefix_goes_first(self) -> None:
        world = ScheduledWorld(num_blocks=9)
        texts = [[i] * 9 for i in range(4)]  # 2 whole blocks and a third each
        for text in texts[:3]:
            num_cached(world, text)
        assert world.scheduler.block_pool.cache.num_idle == 6
        assert num_cached(world, texts[0]) == 8, "now the latest"
        num_cached(world, [7] * 24)  # 6 blocks, of which 3 are free
        cache = world.scheduler.block_pool.cache
        found = [len(cache.find(digests_of(text))) for text in texts]
        assert found == [2, 0, 1, 0], "1 lost both its blocks, 2 the last"

    def test_what_follows_an_evicted_block_is_not_found(self) -> None:
        """A block may go before the next one: of two equal ones only the first is cached, and its
        sequence may end before the one that computed the next.
        """
        pool = BlockPool(4)
        first: list[int] = []
        second: list[int] = []
        pool.extend(first, 1)
        pool.extend(second, 3)
        one, two = digests_of(TEXT[:8])
        pool.cache.add(one, first[0])
        pool.cache.add(one, second[0])
        pool.cache.add(two, second[1])
        pool.release(first)
        assert pool.cache.find([one, two]) == [0, 2]
        pool.extend(second, 4)
        assert pool.cache.find([one, two]) == []


class TestEngine:
    def test_a_sequence_larger_than_the_pool_is_refused(self, start_engine: StartEngine) -> None:
        session = start_engine(num_blocks=10, max_model_len=200).attach()
        too_long = session.wait_end(session.open([1] * 20, max_new_tokens=21))
        assert too_long.error.field == "max_new_tokens"  # type: ignore[union-attr]
        longest = session.open([1] * 20, max_new_tokens=20)
        session.wait_end(longest)
        assert session.output(longest) == continue_by(hashed, [1] * 20, 20)
