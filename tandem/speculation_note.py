"""What drafts brought, in one sentence, and if little, why.

Owns the wording, for `tandem bench`, `tandem doctor` and the page alike. Pure.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from tandem.values import Usage

# Of decoding: fewer say nothing.
_FEWEST_STEPS = 8
# Tokens per step; with more, there is nothing to explain.
_LITTLE = 1.25

# By field of `UndraftedSteps`; of steps with drafts, those that accepted none.
_REASONS = {
    "no_match": "nothing that repeats was found",
    "late": "no drafter had answered in time",
    "declined": "drafts were not worth what their rows cost",
    "forbidden": "the grammar forbade what was drafted",
    "limited": "limits left no room for drafts",
    "rejected": "what was drafted was wrong",
}


def speculation_note(usages: Iterable[Usage]) -> str:
    """The sentence about choices, without a full stop; "" if there is too little to say.

    Choices that were to have no drafts count nowhere.
    """
    num_steps = num_accepted = 0
    reasons: Counter[str] = Counter()
    for usage in usages:
        if usage.undrafted is None and not usage.num_drafts:
            continue
        # The prompt's step has no drafts.
        num_steps += usage.num_steps - 1
        num_accepted += usage.num_accepted_tokens
        if usage.undrafted is not None:
            reasons.update(asdict(usage.undrafted))
        reasons["rejected"] += usage.num_drafts - sum(usage.accepted_per_position[:1])
    if num_steps < _FEWEST_STEPS:
        return ""
    tokens_per_step = 1 + num_accepted / num_steps
    note = f"{tokens_per_step:.2f} tokens per step"
    if tokens_per_step >= _LITTLE:
        return note
    [(reason, count)] = reasons.most_common(1)
    return f"{note}: in {count / num_steps:.0%} of the steps, {_REASONS[reason]}" if count else note
