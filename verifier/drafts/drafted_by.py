"""Who drafts for a sequence, and by which matching policy, as its Open says it.

Knows no connection; `verifier.drafters` has those.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from tandem.values import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedBy:
    """A sequence's drafter."""

    # "": its session drafts, or nobody does.
    address: str
    # An encoded `NgramParams`, which only the drafter reads.
    encoded_params: bytes
    has_pool: bool
    # The most draft tokens requested at a time; 0: as many as are of use.
    hint_tokens: int
    # What its pool keeps when the sequence ends by itself; None: its Close says it.
    keep: Keep | None
    # What the output may repeat.
    predicted_token_ids: SequenceOf[int] = ()
    # Whether drafts may be more than the policy's: a contradicted hint can be resumed.
    resumes_hints: bool = False
    # The span that its history is part of; "": none.
    trace_parent: str = ""


class AnswersHints(Protocol):
    """What the engine must know of a sequence's drafter.

    Attributes:
        is_overdue: a wait for it was in vain, and it has not answered since.
    """

    address: str
    is_overdue: bool

    @property
    def is_answering(self) -> bool:
        """Whether hints can be expected of it."""
