"""Tool calls in a text of which nothing else is told apart: no reasoning, no stop strings.

For programs that read calls in texts of their own; requests are read by `output_reader.py`.
"""

from collections.abc import Collection, Mapping

from gateway.text.output.argument_values import Parameters
from gateway.text.output.output_reader import OutputReader
from gateway.text.output.parts import Reading
from gateway.text.output.stop_strings import StopStrings
from gateway.text.output.tool_call_form import ToolCallForm, form_of_template

__all__ = ["HermesParser", "Llama3Parser", "ToolCallForm", "ToolCallParser", "form_of_template"]


class ToolCallParser(OutputReader):
    """Finds the calls of one text."""

    def __init__(self, form: ToolCallForm, tools: Collection[str] | Parameters) -> None:
        """Args:
        tools: the names of those that may be called, or also the schemas of their parameters.
        """
        parameters = tools if isinstance(tools, Mapping) else {name: {} for name in tools}
        super().__init__(Reading(form=form, tools=parameters), StopStrings())


class HermesParser(ToolCallParser):
    """Calls between tags; an object or a list of them."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(ToolCallForm.HERMES, names)


class Llama3Parser(ToolCallParser):
    """A text that begins with calls, divided by semicolons."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(ToolCallForm.LLAMA3_JSON, names)
