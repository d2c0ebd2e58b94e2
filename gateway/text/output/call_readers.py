"""Which reader reads the calls of a form."""

from typing import TypeAlias

from gateway.text.output.argument_values import Parameters
from gateway.text.output.marked_call_reader import MarkedCallReader
from gateway.text.output.pythonic_call_reader import PythonicCallReader
from gateway.text.output.tool_call_form import ToolCallForm
from gateway.text.output.tool_call_reader import CallReader

AnyCallReader: TypeAlias = CallReader | MarkedCallReader | PythonicCallReader


def call_reader(
    form: ToolCallForm | None, tools: Parameters, before: str, opening: str = ""
) -> AnyCallReader:
    """A reader of calls that begin now.

    Args:
        before: what of them was read, and is text if they are none.
        opening: what follows, where calls have no mark.
    """
    assert form is not None, "no text begins a call"
    if opening == "[":
        return PythonicCallReader(tools, before)
    marks = form.marks
    if marks is None:
        return CallReader(tools, before, tags=None)
    if marks.name is None and not marks.is_python:
        return CallReader(tools, before, tags=(marks.begin, marks.end))
    return MarkedCallReader(marks, tools, before)
