"""What a stream's chunks say about their drafts: the extension `speculation` of a chunk.

Owns its form and the texts of rejected drafts. Which these are is known only from traces.
"""

import json
from collections.abc import Sequence

from gateway.api import wire
from gateway.messages.response import Chunk, EncodedStep, Step
from gateway.text.detokenizer import Detokenizer
from tandem.values import DraftSource

_SOURCES = {None: None, DraftSource.SEQUENCE: "own", DraftSource.POOL: "pool"}


class SpeculationReport:
    """The reports of one choice, in order."""

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        """Args:
        detokenizer: of its own, for rejected drafts; it has been fed what comes before the output.
            None: no token has a text.
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
            token_ids = chunk.token_ids[first : first + step.num_tokens]
            first += step.num_tokens
            texts = step.token_texts or [""] * step.num_tokens
            tokens += [
                {"id": token_id, "text": text, "accepted": index < step.num_accepted_tokens}
                for index, (token_id, text) in enumerate(zip(token_ids, texts, strict=True))
            ]
            self._feed(token_ids[: step.num_accepted_tokens])
            if self._rejected is not None:
                rejected = self._show_rejected(self._rejected)
                self._rejected = None
            self._feed(token_ids[step.num_accepted_tokens :])
        drafted = [step for step in chunk.steps if step.num_draft_tokens]
        last = drafted[-1] if drafted else Step(0, 0, 0)
        report: dict[str, object] = {
            "num_accepted_tokens": chunk.num_accepted_tokens,
            "num_draft_tokens": chunk.num_draft_tokens,
            "tokens": tokens,
            "match_length": last.matched_ngram_length if drafted else None,
            "source": _SOURCES[last.source],
        }
        if rejected is not None:
            report["rejected"] = rejected
        return json.dumps(report, separators=(",", ":"))

    def _feed(self, token_ids: Sequence[int]) -> None:
        if self._detokenizer is not None:
            self._detokenizer.feed(token_ids)

    def _show_rejected(self, token_ids: Sequence[int]) -> list[dict[str, object]]:
        if self._detokenizer is None:
            return [{"id": token_id, "text": ""} for token_id in token_ids]
        detokenizer = self._detokenizer.copy()
        return [{"id": token_id, "text": detokenizer.feed((token_id,))} for token_id in token_ids]
