"""Where one sequence's output stands in its grammar."""

import re
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from verifier.errors import InvalidRequestError

_MAX_REASON_CHARACTERS = 512
# Of a text that must come: as many as a grammar may have. A regex of 25 bytes forces so long a text
# that its matcher takes 160 MB to find it.
_MAX_FORCED_BYTES = 1 << 16
# Before what is wrong with a schema that is part of a grammar in Lark: a line and a column of that.
_PLACE = re.compile(r"^at \d+\(\d+\): (?=failed to compile JSON schema: )")

# Behind a name that is no token: those that are, as the library knows them (`LibraryTokenizer`).
_ITS_TOKENS = re.compile(r"; following special tokens are available: .*")
# What the library calls a place where nothing may come, not even the end.
_NOTHING_ALLOWED = frozenset(("NoExtension", "NoExtensionBias"))


class GrammarPanicError(Exception):
    """The grammar library panicked."""


class GrammarState:
    """Implements `Constraint`. Owned by the thread that verifies its sequence.

    The output must be taken in before anything is asked. Where it does not follow the grammar, or
    the grammar is too complex, nothing is drafted, `allows` says no, and `allowed` raises. Matchers
    go on by the output when they are first asked: a device computes the step by then.

    An error of a matcher is for ever. So all that a step with drafts needs is asked of another one:
    where the grammar is too complex for that, the sequence gets no more drafts, and goes on. So it
    does where a text that must come after drafts is too long.

    A matcher that raises leaves nobody to know where it stands. So whatever is asked after that
    raises the same exception.

    Invariant: from `_run_start` on, the output follows `_run`, a text that must come. An empty one
    that starts at the present output says that there is a choice.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        draft_matcher: LLMatcher | None,
        *,
        may_begin: Callable[[bytes, int], bool],
        vocab_size: int,
        end_token_ids: Collection[int],
        field: str,
    ) -> None:
        """Begins before the first output token.

        Args:
            matcher, draft_matcher: its own, two of the same grammar. None: nothing is drafted.
            may_begin: whether a text that must come may begin with a token that the grammar allows,
                and goes on after it as the tokenizer writes the rest; False: only the text as
                tokens tells.
            end_token_ids: what may follow when the grammar's text is complete.
            field: of the request, for errors.
        """
        self._matcher = matcher
        self._may_begin = may_begin
        self._draft_matcher = draft_matcher
        self._end_token_ids = end_token_ids
        self._field = field
        # How many output tokens the matchers have consumed, and the tokens that they have not.
        self._num_taken = 0
        self._new: list[int] = []
        # The library writes such a text as tokens as a whole: once, and not again for each token.
        self._run: list[int] = []
        self._run_start = -1
        # Masks of the present output and after each of these drafts. Empty: there are none.
        self._masks = self._no_masks = np.zeros((0, (vocab_size + 31) // 32), dtype=np.int32)
        self._masked_drafts: list[int] = []
        # What a matcher raised.
        self._fault: Exception | None = None

    @property
    def error(self) -> InvalidRequestError | None:
        """Why the output cannot go on, if it cannot."""
        self._go_on()
        return self._error_of(self._matcher)

    def forget_fault(self) -> None:
        """Once nothing is asked any more. The traceback of what a matcher raised leads back here,
        so the matchers would stay until the next collection of garbage.
        """
        self._fault = None

    def take_in(self, token_ids: SequenceOf[int], prompt_length: int) -> None:
        """Takes in the output tokens that are new.

        Args:
            token_ids: all of the sequence, prompt included, drafts excluded.
        """
        self._new += token_ids[prompt_length + self._num_taken + len(self._new) :]

    def num_possible(self, draft_token_ids: SequenceOf[int]) -> int:
        """How many drafts, from the first on, the grammar allows."""
        matcher = self._drafting()
        if matcher is None or not draft_token_ids:
            return 0
        num_possible: int = self._ask(matcher.validate_tokens, list(draft_token_ids))
        return num_possible

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
        if limit <= 0 or self._drafting() is None:
            return []
        start = self._find_run()
        return self._run[start : start + limit]

    def has_masks(self, draft_token_ids: SequenceOf[int]) -> bool:
        """Whether `allowed` has nothing to compute for these drafts."""
        if self._new or not len(self._masks):
            return False
        return self._masked_drafts[: len(draft_token_ids)] == list(draft_token_ids)

    def allows(self, token_ids: SequenceOf[int]) -> bool:
        """See `Constraint`. Of several tokens, only masks tell."""
        *drafts, last = token_ids
        if self.has_masks(drafts):
            return all(map(_is_set, self._masks, token_ids))
        if drafts:
            return False
        self._go_on()
        place = self._find_run_before(last)
        if place < len(self._run):
            return self._run[place] == last
        num_allowed: int = self._ask(self._matcher.validate_tokens, [last])
        return num_allowed == 1

    def allowed(self, draft_token_ids: SequenceOf[int]) -> npt.NDArray[np.int32]:
        """See `Constraint`."""
        if not self.has_masks(draft_token_ids):
            self._mask(draft_token_ids)
        if (error := self.error) is not None:
            raise error
        num_rows = len(draft_token_ids) + 1
        masks = self._masks[:num_rows]
        if len(masks) == num_rows:
            return masks
        assert self._draft_matcher is not None, "drafts of a sequence that has none"
        if (error := self._error_of(self._draft_matcher)) is not None:
            raise error
        return np.pad(masks, ((0, num_rows - len(masks)), (0, 0)))

    def _mask(self, draft_token_ids: SequenceOf[int]) -> None:
        """Computes the masks of the present output and after the drafts, up to one that is not
        allowed or after which the grammar is too complex.
        """
        self._go_on()
        self._masks, self._masked_drafts = self._no_masks, []
        matcher = self._drafting() if draft_token_ids else self._matcher
        if matcher is None:
            return
        masks = np.zeros((len(draft_token_ids) + 1, self._masks.shape[1]), dtype=np.int32)
        num_masked = num_tried = 0
        place = self._find_run()
        run = self._run
        for row, draft in enumerate((*draft_token_ids, None)):
            if row and place == len(run):
                run, place = self._ask(_forced_by, matcher), 0
                if run is None:
                    # The output may never come to it. This matcher holds much memory now.
                    self._draft_matcher = None
                    break
            if place < len(run):
                word, bit = divmod(run[place], 32)
                masks.view(np.uint32)[row, word] = 1 << bit
                place += 1
            elif not matcher.is_error():
                self._ask(fill_next_token_bitmask, matcher, masks, row)
            if matcher.is_error():
                break
            num_masked += 1
            if draft is None or not _is_set(masks[row], draft):
                break
            if not self._ask(matcher.try_consume_tokens, [draft]):
                # After an end token nothing follows. Another one was forced, but does not go on as
                # the grammar does: whoever takes it meets the error.
                num_masked += draft in self._end_token_ids and not matcher.is_error()
                break
            num_tried += 1
        if num_tried and not matcher.is_error():
            self._ask(matcher.rollback, num_tried)
        self._masks = masks[:num_masked]
        self._masked_drafts = list(draft_token_ids[: max(0, num_masked - 1)])

    def _drafting(self) -> LLMatcher | None:
        """The matcher that tries drafts, after the present output; None: nothing is drafted."""
        self._go_on()
        matcher = self._draft_matcher
        return None if matcher is None or matcher.is_error() else matcher

    def _go_on(self) -> None:
        """The matchers consume the output.

        Texts that must come are found where they begin, also within several new tokens: written as
        tokens from a later place, some texts are other tokens.
        """
        if self._fault is not None:
            raise self._fault
        if self._new:
            self._masks = self._no_masks
            new, self._new = self._new, []
            for token_id in new:
                place = self._find_run_before(token_id)
                if place < len(self._run) and self._run[place] != token_id:
                    # A client's own tokens for the text.
                    self._run, self._run_start = [], -1
                self._ask(self._matcher.consume_tokens, [token_id])
                self._num_taken += 1
            if self._draft_matcher is not None:
                self._ask(self._draft_matcher.consume_tokens, new)

    def _find_run_before(self, token_id: int) -> int:
        """As `_find_run`; but there need be no `_run` where it cannot matter, if this token comes
        next.
        """
        place = self._num_taken - self._run_start
        if place and place >= len(self._run):
            text: bytes = self._ask(self._matcher.compute_ff_bytes)
            if text and not self._ask(self._may_begin, text, token_id):
                return self._find_run()
        return place

    def _find_run(self) -> int:
        """Finds the text that must come now; returns the place in `_run` where it begins."""
        place = self._num_taken - self._run_start
        if place == 0 or place < len(self._run):
            return place
        run = self._ask(_forced_by, self._matcher)
        if run is None:
            reason = f"a text of more than {_MAX_FORCED_BYTES} bytes must come"
            self._fault = wrong_grammar(reason, self._field)
            raise self._fault
        self._run, self._run_start = run, self._num_taken
        return 0

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a matcher, or the tokenizer."""
        try:
            return function(*arguments)
        except Exception as error:
            self._fault = error
        except BaseException as panic:
            # It is no Exception, and would end more than this sequence.
            self._fault = GrammarPanicError(str(panic))
            self._fault.__cause__ = panic
        self._masks = self._no_masks
        raise self._fault

    def _error_of(self, matcher: LLMatcher) -> InvalidRequestError | None:
        if not matcher.is_error():
            return None
        reason = matcher.get_error() or "the output does not follow it"
        return wrong_grammar(reason, self._field)


def wrong_grammar(reason: str, field: str) -> InvalidRequestError:
    """The error of a grammar: of what the library says, the first line, without a place in a text
    that was made of a schema, and the line that names the cause. The others repeat the grammar.
    """
    first, *others = reason.splitlines()
    if first in _NOTHING_ALLOWED:
        first = "it allows none of the model's tokens here"
    first = _ITS_TOKENS.sub("", first)
    causes = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    parts = (part[:_MAX_REASON_CHARACTERS] for part in (_PLACE.sub("", first), *causes[:1]))
    return InvalidRequestError(" ".join(parts), field=field)


def _forced_by(matcher: LLMatcher) -> list[int] | None:
    """The text that must come, as the tokenizer writes it; None: it is too long."""
    text: bytes = matcher.compute_ff_bytes()
    if not text:
        # After an end token, to ask for tokens is an error.
        return []
    if len(text) > _MAX_FORCED_BYTES:
        return None
    token_ids: list[int] = matcher.compute_ff_tokens()
    return token_ids


def _is_set(mask: npt.NDArray[np.int32], token_id: int) -> bool:
    word, bit = divmod(token_id, 32)
    return word < len(mask) and bool(mask[word] >> bit & 1)
