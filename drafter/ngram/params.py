"""The options of a proposal: which n-grams are matched, where, and which match wins.

Does not know how matches are found (`index.py`, `kmp.py`), nor the wire.
"""

from dataclasses import dataclass
from enum import Enum

from drafter.ngram.table import MAX_NGRAM_TOKENS
from drafter.refusals import InvalidDeltaError

MAX_POOL_ID_BYTES = 256


class Overlap(Enum):
    """Where an earlier occurrence of the last n tokens may lie, of a context of L tokens."""

    DISJOINT = "disjoint"
    """It ends at or before L - n."""
    ALLOWED = "allowed"
    """It is not the suffix itself."""


class Tie(Enum):
    """Which of several occurrences is continued."""

    EARLIEST = "earliest"
    LATEST = "latest"
    LONGEST = "longest"
    """The one with the longest match, of the earliest, the latest and the place that the running
    copy has reached (`draft.py`)."""


class Algorithm(Enum):
    """How occurrences are found; the drafts are the same."""

    INDEX = "index"
    """A hash index, updated as tokens arrive: the same cost at every length. Only for
    `Tie.LONGEST` with `Overlap.DISJOINT`: the text is scanned under other options."""
    KMP = "kmp"
    """A scan of the history: no memory beside the tokens, but a cost linear in their number."""


class Keep(Enum):
    """Which part of a finished sequence's text goes to its pool."""

    NOTHING = "nothing"
    OUTPUT = "output"
    """What followed its prompt."""
    ALL = "all"
    """Its prompt and its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramParams:
    """The options of one sequence, from its creation on.

    Raises:
        InvalidDeltaError: n-gram sizes out of 1 <= min_ngram <= max_ngram <= 32,
            `tokens_per_match` without `Tie.LONGEST`, or a long `pool_id`.
    """

    min_ngram: int = 2
    """Shortest pattern tried."""
    max_ngram: int = 5
    """Longest pattern tried; the longest that matches wins."""
    overlap: Overlap = Overlap.DISJOINT
    tie: Tie = Tie.EARLIEST
    tokens_per_match: int = 0
    """With `Tie.LONGEST`: most draft tokens per token of the match; 0: no such limit."""
    algorithm: Algorithm = Algorithm.INDEX
    pool_id: str = ""
    """The pool of texts that is drafted from too, and that this sequence may feed; empty: none."""
    pool_min_ngram: int = 0
    """With `Tie.EARLIEST` or `Tie.LATEST`: the pool is searched when the sequence's own match is
    shorter than this; 0: only when there is none. With `Tie.LONGEST` it is always searched."""

    def __post_init__(self) -> None:
        if self.min_ngram < 1:
            raise InvalidDeltaError("params.min_ngram", f"{self.min_ngram} is under 1")
        if self.max_ngram > MAX_NGRAM_TOKENS:
            raise InvalidDeltaError(
                "params.max_ngram", f"{self.max_ngram} is over {MAX_NGRAM_TOKENS}"
            )
        if self.max_ngram < self.min_ngram:
            raise InvalidDeltaError(
                "params.max_ngram", f"{self.max_ngram} is under min_ngram, {self.min_ngram}"
            )
        if self.tokens_per_match > 0 and self.tie is not Tie.LONGEST:
            raise InvalidDeltaError("params.tokens_per_match", "it counts with TIE_LONGEST only")
        if len(self.pool_id.encode()) > MAX_POOL_ID_BYTES:
            raise InvalidDeltaError(
                "params.pool_id",
                f"{len(self.pool_id.encode())} bytes are over {MAX_POOL_ID_BYTES}",
            )

    @property
    def ngram_mask(self) -> int:
        """Bit n - 1 for each n-gram size n."""
        return (1 << self.max_ngram) - (1 << (self.min_ngram - 1))

    @property
    def num_tables(self) -> int:
        """How many n-gram sizes the text's index has; 0: the text is scanned."""
        is_indexed = (
            self.algorithm is Algorithm.INDEX
            and self.tie is Tie.LONGEST
            and self.overlap is Overlap.DISJOINT
        )
        return self.max_ngram - self.min_ngram + 1 if is_indexed else 0


DEFAULT_PARAMS = NgramParams()

DEFAULT_TOKENS_PER_MATCH = 2
"""`tokens_per_match` with `Tie.LONGEST`, where a request does not set it."""
