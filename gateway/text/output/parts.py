"""The parts of an output, and what is told apart in it."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from gateway.text.output.argument_values import Parameters
from gateway.text.output.tool_call_form import ToolCallForm
from gateway.text.output.tool_call_reader import CallDelta
from gateway.text.reasoning import THINK, Reasoning, Tags


class ReasoningText(NamedTuple):
    """Some of a model's reasoning."""

    text: str


#: A text is of the answer.
Piece = str | ReasoningText | CallDelta


class Read(NamedTuple):
    """What became final with a token's text.

    Attributes:
        pieces: in the output's order.
        num_reasoning_tokens: tokens, this one among them or not, that it has become known to be
            of reasoning.
        begins_in_call: whether the token came within a call.
    """

    pieces: Sequence[Piece]
    num_reasoning_tokens: int = 0
    begins_in_call: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is told apart in an output; by default, nothing.

    Attributes:
        reasoning: where the prompt leaves the model's reasoning.
        tags: around it.
        form: in which calls are written; None: they stay text.
        tools: those that may be called, with their parameters; empty: calls stay text.
        has_channels: whether the model writes in channels; neither `reasoning` nor `form` count
            then.
    """

    reasoning: Reasoning = Reasoning.NONE
    tags: Tags = THINK
    form: ToolCallForm | None = None
    tools: Parameters = dataclasses.field(default_factory=dict)
    has_channels: bool = False
