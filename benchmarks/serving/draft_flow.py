"""A simulation of decoding with hints that take a time to come: what the hop costs, on paper.

The model: a step takes a time that depends on its rows alone; what a step decided is published at
its end; a hint for a length arrives one hop after that length was published, and is moved forward
if the sequence has grown meanwhile. The text is known, so drafts are accepted as far as they agree
with it. A step waits for missing hints by the rule of `docs/decisions/hints.md`: while the
probability that their first tokens are right, summed, times a step's time exceeds the remaining hop
times the number of sequences. Everything else (the processors that services share, messages,
clients) takes no time, except a fixed one between a text's end and the next one's start.

Drafts come from the drafter's own kernel. Knows no clock, no engine and no gateway.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.drafter_texts import propose
from drafter.ngram.params import NgramParams, Tie
from drafter.ngram.text import IndexedText
from verifier.drafts.hint_requests import ProbePace, is_gain_unlikely, num_wanted_draft_tokens

TOKENS_PER_MATCH = 2
MAX_DRAFTS = 31
HINT_TOKENS = 64
MAX_STEP_TOKENS = 512
_FIRST_TOKEN_DECAY = 0.8
_STEP_DECAY = 0.9
_PARAMS = NgramParams(min_ngram=2, max_ngram=5, tie=Tie.LONGEST, tokens_per_match=TOKENS_PER_MATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and what the model answers."""

    prompt: Sequence[int]
    output: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What takes time, in seconds."""

    # Of a step, by its rows: prompt tokens, tokens to continue, drafts.
    step_s: Callable[[int], float]
    # From a step's end to the arrival of its hints.
    hop_s: float
    # From a text's end to its successor's start.
    turnaround_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Flow:
    """What a simulated run came to."""

    num_steps: int = 0
    num_tokens: int = 0
    # Steps of each sequence that decided tokens, summed, and how many of them had no draft.
    num_turns: int = 0
    num_turns_without_draft: int = 0
    waited_s: float = 0.0
    duration_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s

    @property
    def tokens_per_turn(self) -> float:
        """Output tokens of a sequence per step that decides any."""
        return self.num_tokens / max(1, self.num_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hint:
    arrives_s: float
    base_length: int
    token_ids: list[int]
    match_length: int


@dataclass(slots=True, kw_only=True)
class _Sequence:
    known: list[int]  # prompt and output
    prompt_length: int
    num_computed: int
    length: int
    starts_s: float
    history: IndexedText | None
    flying: list[_Hint] = field(default_factory=list)
    hint: _Hint | None = None
    answered_length: int = -1
    awaited_length: int = -1
    published_s: float = 0.0
    probability: float = 0.0
    num_useless: int = 0

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.length - 1

    @property
    def may_await(self) -> bool:
        return (
            self.hint is None
            and not self.is_prefilling
            and self.awaited_length == self.length
            and self.answered_length < self.length
        )

    def receive(self, now_s: float) -> None:
        """Takes the hints that have arrived; keeps the newest that still agrees."""
        while self.flying and self.flying[0].arrives_s <= now_s:
            hint = self.flying.pop(0)
            self.answered_length = hint.base_length
            is_right = bool(hint.token_ids) and hint.token_ids[0] == self.known[hint.base_length]
            self.probability = _FIRST_TOKEN_DECAY * self.probability + (
                1 - _FIRST_TOKEN_DECAY
            ) * float(is_right)
            self.num_useless = 0 if is_right else self.num_useless + 1
            self._offer(hint)

    def drafts(self) -> list[int]:
        """What the next step verifies."""
        hint = self.hint
        if hint is None:
            return []
        ahead = self.length - hint.base_length
        trusted = TOKENS_PER_MATCH * max(1, hint.match_length + ahead)
        remaining = len(self.known) - self.length
        return hint.token_ids[ahead : ahead + min(trusted, MAX_DRAFTS, remaining - 1)]

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens
        self.num_computed = self.length - 1
        if self.hint is not None:
            hint, self.hint = self.hint, None
            self._offer(hint)

    def request(self, now_s: float, hop_s: float, probe_pace: ProbePace) -> None:
        """Asks for a hint at the end of a step."""
        assert self.history is not None
        new = self.known[self.history.length : self.length]
        self.history.append(np.array(new, dtype=np.uint32))
        remaining = len(self.known) - self.length
        num_wanted = num_wanted_draft_tokens(num_speculative_tokens=MAX_DRAFTS, remaining=remaining)
        if not num_wanted:
            return
        if is_gain_unlikely(num_useless_hints=self.num_useless) and not probe_pace.take():
            return
        [(token_ids, match_length)] = propose([self.history], [min(HINT_TOKENS, num_wanted)])
        self.flying.append(
            _Hint(
                arrives_s=now_s + hop_s,
                base_length=self.length,
                token_ids=token_ids,
                match_length=match_length,
            )
        )
        self.awaited_length, self.published_s = self.length, now_s

    def _offer(self, hint: _Hint) -> None:
        ahead = self.length - hint.base_length
        agrees = hint.token_ids[:ahead] == self.known[hint.base_length : self.length]
        if agrees and ahead < len(hint.token_ids):
            self.hint = hint


def simulate(texts: Sequence[Text], costs: Costs, *, streams: int, speculate: bool) -> Flow:
    """Decodes all texts, `streams` at a time."""
    flow = Flow()
    probe_pace = ProbePace()
    waiting = list(texts)[::-1]
    running: list[_Sequence] = []
    now_s = 0.0
    mean_step_s: float | None = None

    def open_next() -> None:
        if waiting:
            text = waiting.pop()
            running.append(
                _opened(text, now_s + costs.turnaround_s * (flow.num_steps > 0), speculate)
            )

    for _ in range(streams):
        open_next()
    while running:
        now_s = max(now_s, min(sequence.starts_s for sequence in running))
        ready = [sequence for sequence in running if sequence.starts_s <= now_s]
        for sequence in ready:
            sequence.receive(now_s)
        if mean_step_s is not None:
            wait_s = _wait_s(ready, now_s, mean_step_s, costs.hop_s)
            flow.waited_s += wait_s
            now_s += wait_s
            for sequence in ready:
                sequence.receive(now_s)
        num_rows, decided = _scheduled(ready)
        step_s = costs.step_s(num_rows)
        now_s += step_s
        if all(not sequence.is_prefilling for sequence in ready):
            mean_step_s = (
                step_s
                if mean_step_s is None
                else _STEP_DECAY * mean_step_s + (1 - _STEP_DECAY) * step_s
            )
        flow.num_steps += 1
        probe_pace.begin_step(now_s)
        for sequence, drafts in decided:
            flow.num_turns += 1
            flow.num_turns_without_draft += not drafts
            num_tokens = 1 + _num_agreeing(drafts, sequence.known[sequence.length :])
            flow.num_tokens += num_tokens
            sequence.advance(num_tokens)
            if sequence.length == len(sequence.known):
                running.remove(sequence)
                open_next()
            elif speculate:
                sequence.request(now_s, costs.hop_s, probe_pace)
    flow.duration_s = now_s
    return flow


def _opened(text: Text, starts_s: float, speculate: bool) -> _Sequence:
    history = None
    if speculate:
        history = IndexedText(params=_PARAMS, max_tokens=1 << 20)
        history.append(np.array(text.prompt, dtype=np.uint32))
    return _Sequence(
        known=[*text.prompt, *text.output],
        prompt_length=len(text.prompt),
        num_computed=0,
        length=len(text.prompt),
        starts_s=starts_s,
        history=history,
    )


def _wait_s(ready: Sequence[_Sequence], now_s: float, step_s: float, hop_s: float) -> float:
    """How long the step waits: until all missing hints are here, or not at all."""
    missing = [sequence for sequence in ready if sequence.may_await]
    if not missing:
        return 0.0
    gain_s = sum(sequence.probability for sequence in missing) * step_s / len(ready)
    remaining_s = hop_s - (now_s - max(sequence.published_s for sequence in missing))
    return max(0.0, remaining_s) if gain_s > remaining_s else 0.0


def _scheduled(ready: Sequence[_Sequence]) -> tuple[int, list[tuple[_Sequence, list[int]]]]:
    """The step's rows, and the sequences that decide tokens in it with their drafts.

    Sequences that decode come first; prompts share what is left of the step's tokens.
    """
    decided = [(each, each.drafts()) for each in ready if not each.is_prefilling]
    num_rows = sum(1 + len(drafts) for _, drafts in decided)
    for sequence in ready:
        if sequence.is_prefilling:
            chunk = min(sequence.length - sequence.num_computed, MAX_STEP_TOKENS - num_rows)
            if chunk <= 0:
                break
            num_rows += chunk
            sequence.num_computed += chunk
            if sequence.num_computed == sequence.length:
                decided.append((sequence, []))
    return num_rows, decided


def _num_agreeing(drafts: Sequence[int], truth: Sequence[int]) -> int:
    # The last token of the text is decided without a draft for what follows it.
    for count, (draft, token) in enumerate(zip(drafts, truth[:-1], strict=False)):
        if draft != token:
            return count
    return min(len(drafts), len(truth) - 1)
