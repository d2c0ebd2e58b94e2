"""The order in which prompts get a step's budget.

By priority, and of equals in the order in which they run, except that short ones overtake: up to
half of the budget goes to those that the step can finish, the shortest first.
"""

import itertools
import operator

from verifier.scheduling.running_set import RunningSet
from verifier.scheduling.sequence import Sequence


def in_prefill_order(
    running: RunningSet,
    prefilling: list[Sequence],
    *,
    budget: int,
    num_spare_blocks: int,
    scored_rows: int,
) -> list[Sequence]:
    """The prompts in the order in which they get the step's budget: by priority. Within each,
    short ones overtake, by what higher priorities leave.

    Args:
        prefilling: in order; the first one's next block is reserved.
        budget: the step's tokens for them.
        scored_rows: the most of their rows that the step scores.
    """
    if len(prefilling) < 2:
        return prefilling
    first = prefilling[0]
    num_spare_blocks += running.num_blocks_with_next(first) - len(first.block_table)
    in_order: list[Sequence] = []
    for _, equals in itertools.groupby(prefilling, key=operator.attrgetter("priority")):
        prompts = list(equals)
        if len(prompts) > 1 and budget > 0:
            prompts = _overtaking(running, prompts, budget, num_spare_blocks, scored_rows)
        in_order += prompts
        if len(in_order) == len(prefilling):
            break
        for sequence in prompts:
            if budget <= 0:
                break
            num_missing = num_missing_tokens(sequence)
            num_tokens = min(num_missing, sequence.longest_chunk(scored_rows))
            budget -= num_tokens
            num_spare_blocks -= running.num_blocks_for_next(sequence, num_tokens)
            scored_rows -= len(sequence.scored_rows(num_tokens))
    return in_order


def _overtaking(
    running: RunningSet,
    prompts: list[Sequence],
    budget: int,
    num_spare_blocks: int,
    scored_rows: int,
) -> list[Sequence]:
    """Prompts of one priority in the order in which they get the budget.

    Those that half of the budget can finish overtake the first one, those with the fewest
    missing tokens first. They leave it the blocks and the scored rows for its own half.
    """
    first = prompts[0]
    num_kept = min(
        num_missing_tokens(first), first.longest_chunk(scored_rows), budget - budget // 2
    )
    num_spare_blocks -= running.num_blocks_for_next(first, num_kept)
    scored_rows -= len(first.scored_rows(num_kept))
    budget //= 2
    overtaking = []
    for sequence in sorted(prompts[1:], key=num_missing_tokens):
        num_tokens = num_missing_tokens(sequence)
        if num_tokens > budget:
            break
        num_blocks = running.num_blocks_for_next(sequence, num_tokens)
        if num_blocks > num_spare_blocks or num_tokens > sequence.longest_chunk(scored_rows):
            continue
        overtaking.append(sequence)
        budget -= num_tokens
        num_spare_blocks -= num_blocks
        scored_rows -= len(sequence.scored_rows(num_tokens))
    overtakes = set(overtaking)
    return [*overtaking, *(s for s in prompts if s not in overtakes)]


def num_missing_tokens(sequence: Sequence) -> int:
    """Known tokens that a prefilling sequence may compute. One whose next token is decided only
    together with a hint leaves its last token to that step.
    """
    num_missing = len(sequence.token_ids) - sequence.num_computed_tokens
    return num_missing - 1 if sequence.steps_only_with_hint else num_missing
