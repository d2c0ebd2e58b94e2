"""Where one sequence's output stands in its grammar."""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from verifier.errors import InvalidRequestError


class GrammarState:
    """Implements `Constraint`. Owned by one thread at a time: the engine's, and that of
    `MasksAhead` during a forward pass.

    The output must be taken in before anything is asked. Where it does not follow the grammar, or
    the grammar is too complex, nothing is drafted, and `allowed` raises. Matchers go on by the
    output when they are first asked, since that takes them as long as a part of a mask.

    An error of a matcher is for ever. So drafts are tried by another one: where the grammar is too
    complex after a draft, the sequence gets no more drafts, and goes on.

    A matcher that raises leaves nobody to know where it stands. So whatever is asked after that
    raises the same exception.

    Invariant: from `_run_start` on, the output follows `_run`, a text that must come. An empty one
    that starts at the present output says that there is a choice.
    """

    def __init__(
        self, matcher: LLMatcher, draft_matcher: LLMatcher, *, vocab_size: int, field: str
    ) -> None:
        """Begins before the first output token.

        Args:
            matcher, draft_matcher: its own, two of the same grammar.
            field: of the request, for errors.
        """
        self._matcher = matcher
        self._draft_matcher = draft_matcher
        self._num_words = (vocab_size + 31) // 32
        self._field = field
        # Of the output: how many tokens the matchers have consumed, and those that they have not.
        self._num_taken = 0
        self._new: list[int] = []
        # The library writes such a text as tokens as a whole: once, and not again for each token.
        self._run: list[int] = []
        self._run_start = -1
        # Of the drafts that were asked for last, after the present output.
        self._masked_drafts: list[int] = []
        self._masks: npt.NDArray[np.int32] | None = None
        # What a matcher raised.
        self._fault: BaseException | None = None

    @property
    def error(self) -> InvalidRequestError | None:
        """Why the output cannot go on, if it cannot."""
        self._go_on()
        return self._error_of(self._matcher)

    def take_in(self, token_ids: SequenceOf[int], prompt_length: int) -> None:
        """Takes in the output tokens that are new.

        Args:
            token_ids: all of the sequence, prompt included, drafts excluded.
        """
        self._new += token_ids[prompt_length + self._num_taken + len(self._new) :]

    def num_possible(self, draft_token_ids: SequenceOf[int]) -> int:
        """How many drafts, from the first on, the grammar allows."""
        self._go_on()
        if not draft_token_ids or self._draft_matcher.is_error():
            return 0
        return self._draft_matcher.validate_tokens(list(draft_token_ids))

    def num_verifiable(self, draft_token_ids: SequenceOf[int]) -> int:
        """How many of these drafts a step can verify: those that it can say of what may follow."""
        if not draft_token_ids:
            return 0
        self._mask(draft_token_ids)
        return len(self._masked_drafts)

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens: the text that must come, as the tokenizer writes it. Other tokens
        are not allowed for it.
        """
        if limit <= 0:
            return []
        self._go_on()
        if self._draft_matcher.is_error():
            return []
        start = self._find_run()
        return self._run[start : start + limit]

    def has_masks(self, draft_token_ids: SequenceOf[int]) -> bool:
        """Whether `allowed` has nothing to compute for these drafts."""
        if self._new or self._masks is None:
            return False
        return self._masked_drafts[: len(draft_token_ids)] == list(draft_token_ids)

    def allowed(self, draft_token_ids: SequenceOf[int]) -> npt.NDArray[np.int32]:
        """See `Constraint`."""
        num_drafts = len(draft_token_ids)
        if not self.has_masks(draft_token_ids):
            self._mask(draft_token_ids)
        if (error := self.error) is not None:
            raise error
        assert self._masks is not None, "just computed"
        masks = self._masks[: num_drafts + 1]
        if len(masks) > num_drafts:
            return masks
        if (error := self._error_of(self._draft_matcher)) is not None:
            raise error
        return np.pad(masks, ((0, num_drafts + 1 - len(masks)), (0, 0)))

    def _mask(self, draft_token_ids: SequenceOf[int]) -> None:
        """Computes the masks of the present output and after the drafts, up to one that is not
        allowed or after which the grammar is too complex.
        """
        self._go_on()
        masks = np.zeros((len(draft_token_ids) + 1, self._num_words), dtype=np.int32)
        matcher, num_masked, num_tried = self._matcher, 0, 0
        place = self._find_run()
        run = self._run
        with self._remembering_fault():
            for row, draft in enumerate((*draft_token_ids, None)):
                if row and place == len(run):
                    run, place = _forced_by(matcher), 0
                if place < len(run):
                    word, bit = divmod(run[place], 32)
                    masks.view(np.uint32)[row, word] = 1 << bit
                    place += 1
                elif not matcher.is_error():
                    fill_next_token_bitmask(matcher, masks, row)
                if matcher.is_error():
                    break
                num_masked += 1
                if draft is None or not _is_set(masks[row], draft):
                    break
                matcher = self._draft_matcher
                if matcher.is_error():
                    break
                if not matcher.try_consume_tokens([draft]):
                    # An end token: nothing follows.
                    num_masked += not matcher.is_error()
                    break
                num_tried += 1
            if not self._draft_matcher.is_error():
                self._draft_matcher.rollback(num_tried)
        self._masked_drafts = list(draft_token_ids[: max(0, num_masked - 1)])
        self._masks = masks[:num_masked]

    def _go_on(self) -> None:
        """The matchers consume the output."""
        if self._fault is not None:
            raise self._fault
        if self._new:
            with self._remembering_fault():
                self._matcher.consume_tokens(self._new)
                self._draft_matcher.consume_tokens(self._new)
            self._num_taken += len(self._new)
            self._new = []
            self._masks = None

    @contextlib.contextmanager
    def _remembering_fault(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fault = error
            raise

    def _find_run(self) -> int:
        """Finds the text that must come now; returns the place in `_run` where it begins."""
        place = self._num_taken - self._run_start
        if place == 0 or place < len(self._run):
            return place
        self._run, self._run_start = _forced_by(self._matcher), self._num_taken
        return 0

    def _error_of(self, matcher: LLMatcher) -> InvalidRequestError | None:
        if not matcher.is_error():
            return None
        reason = matcher.get_error() or "the output does not follow it"
        return InvalidRequestError(reason.splitlines()[0], field=self._field)


def _forced_by(matcher: LLMatcher) -> list[int]:
    """The text that must come, as the tokenizer writes it."""
    if matcher.is_stopped():
        # After an end token, asking is an error.
        return []
    token_ids: list[int] = matcher.compute_ff_tokens()
    return token_ids


def _is_set(mask: npt.NDArray[np.int32], token_id: int) -> bool:
    word, bit = divmod(token_id, 32)
    return word < len(mask) and bool(mask[word] >> bit & 1)
