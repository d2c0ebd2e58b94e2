"""One Score call: the target model's scores of given drafts, without sampling.

A call opens its sequences on a session of its own. The engine computes them like prompts, in chunks
under the common token budget, and emits the scores of the requested rows (`scores.py`). No
drafter is needed. Closing the call ends its open sequences.
"""

from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field

from servicekit.errors import RequestError
from tandem.values import DraftWait, TokenLogprob
from verifier.engine.engine import Engine
from verifier.engine.messages import DetachSession, Event, Open, Rejected, Scored, StepStats
from verifier.errors import InternalError
from verifier.sampling import Sampling
from verifier.sampling.scored_rows import ScoredPosition
from verifier.scheduling.sequence import OpenSequence, Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsToScore:
    """A prompt, not empty and in the vocabulary, and the drafts to score after it.

    `unscored_reason` says why the request's drafts are left out; empty: they are not.
    """

    token_ids: list[int]
    draft_token_ids: list[int]
    unscored_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How all sequences of a call are scored."""

    scoring: Scoring
    # Adjusts the logits that are scored; row j's history is the prompt and drafts[:j].
    sampling: Sampling
    # Masked among the first `sampling.min_new_tokens` tokens.
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""


@dataclass(slots=True, kw_only=True)
class SequenceScores:
    """The scores of one sequence: K_i + 1 positions."""

    positions: list[ScoredPosition] = field(default_factory=list)
    # One for each token after the first; empty if not requested.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


def drafts_to_score(
    token_ids: list[int], draft_token_ids: list[int], *, vocab_size: int, max_model_len: int
) -> DraftsToScore:
    """The drafts, or, if the model cannot score them, none and the reason."""
    reason = ""
    outside = next((t for t in draft_token_ids if not 0 <= t < vocab_size), None)
    num_tokens = len(token_ids) + len(draft_token_ids)
    if outside is not None:
        reason = f"draft token id {outside} is outside the vocabulary of {vocab_size}"
    elif num_tokens > max_model_len:
        reason = f"with its drafts it has {num_tokens} tokens, over the limit of {max_model_len}"
    return DraftsToScore(
        token_ids=token_ids,
        draft_token_ids=[] if reason else draft_token_ids,
        unscored_reason=reason,
    )


class ScoreCall:
    """One call. `close` must be called, by any thread; it frees the call's sequences.

    Attributes:
        result: each sequence's scores; fails with the error of the first sequence that fails.
    """

    def __init__(
        self, engine: Engine, sequences: SequenceOf[DraftsToScore], options: ScoreOptions
    ) -> None:
        self.result: Future[list[SequenceScores]] = Future()
        # It can no longer be cancelled, so the engine thread can always set it.
        self.result.set_running_or_notify_cancel()
        self._engine = engine
        # Used by the sink, on the engine thread.
        self._scores = [SequenceScores() for _ in sequences]
        self._num_missing = len(sequences)
        self._session_id = engine.attach(self._sink)
        if not sequences:
            self.result.set_result([])
        for index, sequence in enumerate(sequences):
            opened = _open_sequence(str(index), sequence, options)
            engine.submit(Open(session_id=self._session_id, sequence=opened))

    def close(self) -> None:
        """Idempotent."""
        self._engine.submit(DetachSession(session_id=self._session_id))

    def _sink(self, events: list[Event], step: StepStats | None) -> None:
        try:
            self._add_scores(events)
        except Exception as error:
            self.result.set_exception(error)

    def _add_scores(self, events: list[Event]) -> None:
        for event in events:
            if self.result.done():
                return
            match event:
                case Scored():
                    scores = self._scores[int(event.sequence_id)]
                    scores.prompt_logprobs += event.scored.prompt_logprobs
                    scores.positions += event.scored.positions
                    self._num_missing -= event.is_last
                    if self._num_missing == 0:
                        self.result.set_result(self._scores)
                case Rejected():
                    self.result.set_exception(_of_sequence(event.sequence_id, event.error))
                case _:
                    pass


def _open_sequence(
    sequence_id: str, sequence: DraftsToScore, options: ScoreOptions
) -> OpenSequence:
    return OpenSequence(
        sequence_id=sequence_id,
        token_ids=sequence.token_ids + sequence.draft_token_ids,
        prompt_length=len(sequence.token_ids),
        sampling=options.sampling,
        max_new_tokens=len(sequence.draft_token_ids),
        stop_token_ids=options.stop_token_ids,
        draft_wait=DraftWait.NEVER,
        drafting=False,
        num_speculative_tokens=0,
        cache_salt=options.cache_salt,
        scoring=options.scoring,
    )


def _of_sequence(sequence_id: str, error: RequestError) -> RequestError:
    """The error with the call's sequence in its field; an overload or a fault of ours unchanged."""
    if error.retry_after_ms is not None or isinstance(error, InternalError):
        return error
    name = f"sequences[{sequence_id}]"
    return type(error)(error.message, field=f"{name}.{error.field}" if error.field else name)
