"""What a stream's chunks say about their drafts: the extension `speculation` of a chunk.

Owns its form and the texts of its tokens. Which drafts were rejected is known only from traces.
"""

import json
from collections.abc import Mapping, Sequence

from gateway.api import wire
from gateway.messages.response import Chunk, EncodedStep, Source, Step
from gateway.text.detokenizer import Detokenizer

_SOURCES: Mapping[int, str] = {Source.SEQUENCE: "own", Source.POOL: "pool"}


class SpeculationReport:
    """The reports of one choice, in order."""

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        """Args:
        detokenizer: of its own; it has been fed what comes before the output. None: the tokens'
            texts are empty.
        """
        self._detokenizer = detokenizer
        self._rejected: Sequence[int] | None = None

    def add_trace(self, step: EncodedStep) -> None:
        """The trace of the step whose tokens come next."""
        self._rejected = wire.rejected_drafts(step)

    def read(self, chunk: Chunk) -> str:
        """The next chunk's, as JSON.

        With traces a chunk covers one step, so the rejected drafts are that step's. Their texts
        continue the accepted drafts.
        """
        tokens: list[dict[str, object]] = []
        rejected: list[dict[str, object]] | None = None
        first = 0
        for step in chunk.steps:
            end = first + step.num_tokens
            accepted_end = first + step.num_accepted_tokens
            tokens += self._show(chunk.token_ids[first:accepted_end], accepted=True)
            if self._rejected is not None and step.num_tokens:
                rejected = self._show_rejected(self._rejected)
                self._rejected = None
            tokens += self._show(chunk.token_ids[accepted_end:end], accepted=False)
            first = end
        drafted = [step for step in chunk.steps if step.num_draft_tokens]
        last = drafted[-1] if drafted else Step(0, 0, 0)
        report: dict[str, object] = {
            "num_accepted_tokens": chunk.num_accepted_tokens,
            "num_draft_tokens": chunk.num_draft_tokens,
            "tokens": tokens,
            "match_length": last.matched_ngram_length if drafted else None,
            "source": _SOURCES.get(last.source),
        }
        if rejected is not None:
            report["rejected"] = rejected
        return json.dumps(report, separators=(",", ":"))

    def _show(self, token_ids: Sequence[int], *, accepted: bool) -> list[dict[str, object]]:
        return [
            {"id": token_id, "text": _text(self._detokenizer, token_id), "accepted": accepted}
            for token_id in token_ids
        ]

    def _show_rejected(self, token_ids: Sequence[int]) -> list[dict[str, object]]:
        detokenizer = None if self._detokenizer is None else self._detokenizer.copy()
        return [{"id": token_id, "text": _text(detokenizer, token_id)} for token_id in token_ids]


def _text(detokenizer: Detokenizer | None, token_id: int) -> str:
    """The text that became final with a token: "" within a character and of special tokens."""
    return "" if detokenizer is None else detokenizer.feed((token_id,))
