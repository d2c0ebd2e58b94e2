"""One sequence's known tokens, as an indexed text, and how many of them are its prompt.

Does not know why tokens are appended or refused, nor that there are other sequences
(`history_store.py`).
"""

from drafter.indexed_text import IndexedText
from drafter.ngram_params import NgramParams
from drafter.pool_link import NEVER, link_to_pool


class History(IndexedText):
    """The known tokens of one sequence; owned by the event loop, through the store.

    Attributes:
        sequence_id: whose they are.
        prompt_length: how many of its tokens are prompt, once all of that has arrived.
        slot: its place in the store's table while it is kept; set by the store.
        is_kept: whether the store still knows it; set by the store.
    """

    __slots__ = ("is_kept", "prompt_length", "sequence_id", "slot")

    def __init__(
        self, *, params: NgramParams, prompt_length: int, max_tokens: int, sequence_id: str = ""
    ) -> None:
        super().__init__(params=params, max_tokens=max_tokens)
        self.sequence_id = sequence_id
        self.prompt_length = prompt_length
        self.slot = -1
        self.is_kept = False
        if params.pool_id:
            link_to_pool(self.address, NEVER, 0, params.pool_min_ngram)
