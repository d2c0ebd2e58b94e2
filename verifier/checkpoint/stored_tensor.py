"""A tensor's place in a file."""

from dataclasses import dataclass
from pathlib import Path

from verifier.checkpoint.group_formats import FORMATS
from verifier.checkpoint.refusals import NotServedError
from verifier.checkpoint.weight_types import WeightType

WEIGHT_TYPES = {
    "F32": WeightType.FLOAT32,
    "BF16": WeightType.BFLOAT16,
    "F16": WeightType.FLOAT16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a mapped file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    # Where its bytes are in the file.
    start: int
    end: int
    file: Path
    # Of how many heads, the rows' halves lie in pairs; 0: in the order that transformers has.
    num_paired_heads: int = 0
    # What its float32 values are more than those that are asked for.
    offset: float = 0.0
    # Whether its values are minus the exponentials of those that are asked for.
    is_negative_exponential: bool = False
    # Whether columns lie one after the other, not rows.
    is_by_columns: bool = False
    # Its rows are every `row_step`-th of those between start and end, from `first_row` on.
    first_row: int = 0
    row_step: int = 1

    @property
    def type(self) -> WeightType:
        """Of its values, in groups float32.

        Raises:
            NotServedError: it is none of float32, bfloat16 and float16.
        """
        if self.dtype in FORMATS:
            return WeightType.FLOAT32
        if self.dtype not in WEIGHT_TYPES:
            raise NotServedError(f"{self.name} is stored as {self.dtype}")
        return WEIGHT_TYPES[self.dtype]
