"""A grammar as the client wrote it."""

from dataclasses import dataclass

from tandem.values import ReasoningTags
from verifier.structured.library_grammar import GrammarKind, Source


@dataclass(frozen=True, slots=True)
class Grammar:
    """Attributes:
    text: of choices, the strings as a JSON list.
    field: of the request, for errors.
    reasoning: may come first; None: nothing may.
    """

    kind: GrammarKind
    text: str
    field: str = ""
    reasoning: ReasoningTags | None = None

    @property
    def source(self) -> Source:
        """What two sequences of one grammar have in common."""
        return Source(self.kind, self.text, self.reasoning)
