"""Tool calls that a model writes as Python calls with named arguments, in a list or in lines.

    [get_weather(city="Oslo", days=2), add(x=1)]

    get_weather(city="Oslo", days=2)
    add(x=1)

Owns what is a call: a text that parses as Python, of nothing but calls of given tools whose
arguments are literals. It is read when its last bracket has come, or the end tag behind lines, so
calls are shown whole.
"""

import ast
import json
from collections.abc import Collection

from gateway.text.output.tool_call_reader import MAX_UNCERTAIN_CHARACTERS, CallDelta, num_begun

_OPENERS, _CLOSERS = "([{", ")]}"
# Characters outside of strings that are no letters, digits or spaces: it is parsed in the event
# loop's thread.
_MAX_MARKS = 2048
# As JSON has them; models write either.
_NAMES = {"true": True, "false": False, "null": None}


class PythonicCallReader:
    """Reads one list, or lines up to an end tag; as `CallReader`."""

    def __init__(self, names: Collection[str], before: str, *, end: str = "") -> None:
        """Args:
        names: of the tools that may be called.
        before: what was read already, and is text if this is no call.
        end: the tag behind lines; "": it is a list.
        """
        self.is_over = False
        self.has_begun = False
        self._names = names
        self._before = before
        self._end = end
        # The last characters outside of strings: as many as the end tag has.
        self._tail = ""
        self._read: list[str] = []
        self._num_read = 0
        self._depth = 0
        self._num_marks = 0
        # Of the string that is open, and whether a backslash came last in it.
        self._quote = ""
        self._is_escaped = False
        self._deltas: list[CallDelta] = []

    @property
    def num_held(self) -> int:
        """How many characters of the text may yet be no call."""
        return len(self._before) + self._num_read

    def feed(self, text: str) -> str:
        """Reads on; returns what was not read, once it is over."""
        for place, character in enumerate(text):
            self._step(character)
            is_whole = self._tail == self._end if self._end else self._depth == 0
            is_too_long = (
                self._num_read + place + 1 >= MAX_UNCERTAIN_CHARACTERS
                or self._num_marks > _MAX_MARKS
            )
            if is_whole or is_too_long:
                self._read.append(text[: place + 1])
                self._num_read += place + 1
                self.is_over = True
                if is_whole:
                    self._take_calls("".join(self._read).removesuffix(self._end))
                return text[place + 1 :]
        self._read.append(text)
        self._num_read += len(text)
        return ""

    def finish(self) -> None:
        """The text is over: a list that has no end is no call; the tag behind lines may lack."""
        if self._end and not self.is_over:
            text = "".join(self._read)
            self._take_calls(text[: len(text) - num_begun(text, self._end)])
        self.is_over = True

    def take(self) -> list[CallDelta]:
        """What came since the last time; a piece of arguments is whole."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def rest(self) -> str:
        """The text, if it is no call; of one that is over, or at the end of all text."""
        return "" if self.has_begun else self._before + "".join(self._read)

    def _step(self, character: str) -> None:
        if self._quote:
            if self._is_escaped or character == "\\":
                self._is_escaped = not self._is_escaped
            elif character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        else:
            if self._end:
                self._tail = (self._tail + character)[-len(self._end) :]
            self._num_marks += not (character.isalnum() or character.isspace())
            self._depth += (character in _OPENERS) - (character in _CLOSERS)

    def _take_calls(self, text: str) -> None:
        try:
            calls = _calls(text, self._names)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return
        self.has_begun = True
        for name, arguments in calls:
            self._deltas += [CallDelta(name, ""), CallDelta(None, arguments)]


def _calls(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Each call's tool and arguments.

    Raises:
        ValueError, TypeError, SyntaxError, RecursionError, MemoryError: it is something else.
    """
    nodes: list[ast.expr] = []
    for line in ast.parse(text).body:
        if not isinstance(line, ast.Expr):
            raise ValueError("a statement")
        nodes += line.value.elts if isinstance(line.value, ast.List) else [line.value]
    if not nodes:
        raise ValueError("no call")
    calls = []
    for call in nodes:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call with named arguments alone")
        name = ast.unparse(call.func)
        if name not in names:
            raise ValueError("not a given tool")
        arguments = {}
        for each in call.keywords:
            if each.arg is None or each.arg in arguments:
                raise ValueError("an argument without a name, or twice")
            arguments[each.arg] = _literal(each.value)
        calls.append((name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
    return calls


def _literal(node: ast.expr) -> object:
    for each in ast.walk(node):
        if isinstance(each, ast.List | ast.Dict):
            continue
        if isinstance(each, ast.Tuple | ast.Set):
            raise ValueError("not of JSON")
    return ast.literal_eval(_with_constants(node))


def _with_constants(node: ast.expr) -> ast.expr:
    return _Constants().visit(node)  # type: ignore[no-any-return]


class _Constants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _NAMES:
            raise ValueError("no literal")
        return ast.Constant(_NAMES[node.id])
