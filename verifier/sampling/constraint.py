"""What a sampler needs of the grammar that a sequence's output follows.

Knows no grammar and no library: `verifier/structured/` has them.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Constraint(Protocol):
    """The grammar that one sequence follows. Owned by the thread that verifies it."""

    def allows(self, token_ids: SequenceOf[int]) -> bool:
        """Whether these tokens, one or more, may come next. It takes less time than masks.

        False: they may not, the grammar is too complex here, or only masks tell.
        """

    def allowed(self, draft_token_ids: SequenceOf[int]) -> npt.NDArray[np.int32]:
        """Which tokens may come next, and after each of K drafts.

        Returns:
            [K + 1, ceil(V / 32)]: bit t % 32 of word t // 32 is token t. Rows after a draft that is
            not allowed have no meaning.

        Raises:
            RequestError: the grammar is too complex here; names the field.
        """
