"""Calls that models write as JSON, and texts with them.

Each case is a text, what of it is shown, and the calls that it holds.
"""

from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """A call as all its deltas together tell it."""

    name: str
    arguments: str


TOOLS: dict[str, dict[str, Any]] = {
    "add": {
        "x": {"type": "integer"},
        "text": {"type": "string"},
        "more": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "object"}]},
    },
    "get_weather": {},
}
ADD = '{"name": "add", "arguments": {"x": 1, "text": "é </b> {\\"}"}}'
ADDED = ToolCall("add", '{"x": 1, "text": "é </b> {\\"}"}')
TAGGED = f"<tool_call>\n{ADD}\n</tool_call>"
QUOTING = '{"name": "add", "arguments": {"a": "</tool_call>", "b": "\\"</tool_call>"}}'
QUOTED = ToolCall("add", '{"a": "</tool_call>", "b": "\\"</tool_call>"}')
WEATHER = '{"name": "get_weather", "parameters": {}}'
INFINITE = '{"name": "add", "arguments": {"x": 1e999}, "parameters": {"x": 1e999}}'
LLAMA_ADD = ADD.replace('"arguments"', '"parameters"')
# Under either key, the first object counts, also within a string. Other values are no arguments,
# but not none either, as `null` is.
EITHER_KEY = [
    (
        '{"name": "add", "arguments": "x", "parameters": {"x": 1}, "arguments": {"x": 2}}',
        [ToolCall("add", '{"x": 1}')],
    ),
    (
        '{"parameters": null, "arguments": {"x": 1}, "name": "add"}',
        [ToolCall("add", '{"x": 1}')],
    ),
    ('{"name": "add", "more": {"arguments": {"x": 1}}}', [ToolCall("add", "{}")]),
    ('{"name": "add", "arguments": " {\\"x\\": \'<\', } "}', [ToolCall("add", ' {"x": "<" }')]),
    ('{"arguments": "{}", "name": "add"}', [ToolCall("add", "{}")]),
    ('{"name": "add", "arguments": null}', [ToolCall("add", "{}")]),
    ("{name: 'add', arguments: {x: 1}}", [ToolCall("add", '{"x": 1}')]),
    ('{"name": "add", "arguments": "none"}', []),
    ('{"parameters": [{}], "name": "add"}', []),
]

HERMES = [
    ("no call at all <tool", "no call at all <tool", []),
    (TAGGED, "", [ADDED]),
    (f"I will add.\n\n{TAGGED}\n", "I will add.", [ADDED]),
    (f"{TAGGED}\n{TAGGED}", "", [ADDED, ADDED]),
    (f"{TAGGED} and then \n", "and then \n", [ADDED]),
    (f"a <tool_call>{ADD}", "a", [ADDED]),
    ("a < b <tool_cal l> <tool_call", "a < b <tool_cal l> <tool_call", []),
    # What is no call of a given tool stays text, to the last character.
    ("x <tool_call>{]</tool_call> y", "x <tool_call>{]</tool_call> y", []),
    ('<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    (
        '<tool_call>{"name": "add", "arguments": 5}',
        '<tool_call>{"name": "add", "arguments": 5}',
        [],
    ),
    ('<tool_call>{"name": ["add"]}</tool_call>', '<tool_call>{"name": ["add"]}</tool_call>', []),
    (
        f"<tool_call>{'[' * 9000}</tool_call>{TAGGED}",
        f"<tool_call>{'[' * 9000}</tool_call>",
        [ADDED],
    ),
    ('<tool_call>{"name": "add"}</tool_call>', "", [ToolCall("add", "{}")]),
    (f"<tool_call>{LLAMA_ADD}</tool_call>", "", [ADDED]),
    *[
        (f"<tool_call>{text}", "" if calls else f"<tool_call>{text}", calls)
        for text, calls in EITHER_KEY
    ],
    # The arguments stay as they were written.
    (
        '<tool_call>{"name": "add", "arguments": {"x":-1e999 , "y": "\\ud800"}}',
        "",
        [ToolCall("add", '{"x":-1e999 , "y": "\\ud800"}')],
    ),
    # Only the first of each key counts, in either order; others are left out.
    (
        '<tool_call>{"id": [{"name": 1}], "arguments": {"x": {}}, "name": "a\\u0064d", "name": 5}',
        "",
        [ToolCall("add", '{"x": {}}')],
    ),
    (
        '<tool_call>{"arguments": {}, "name": "rm"}',
        '<tool_call>{"arguments": {}, "name": "rm"}',
        [],
    ),
    # A call that has begun is not taken back: its mistakes stay in it, up to its end.
    (
        '<tool_call>{"name": "add", "arguments": {"x": NaN}}\n',
        "",
        [ToolCall("add", '{"x": null}')],
    ),
    (f"<tool_call>[{ADD}, {WEATHER}]</tool_call>", "", [ADDED, ToolCall("get_weather", "{}")]),
    (f"<tool_call>\n[\n{ADD}\n]\n</tool_call>\nb", "b", [ADDED]),
    (f'<tool_call>[{ADD}, {{"name": "rm"}}, {ADD}]</tool_call> b', "b", [ADDED, ADDED]),
    (f"<tool_call>[5, {ADD}]</tool_call>", f"<tool_call>[5, {ADD}]</tool_call>", []),
    (f"<tool_call>{ADD}<tool_call>{ADD}", "", [ADDED, ADDED]),
    # A string that lacks its end, if nothing but the end of the text or another call follows.
    *[
        (f'<tool_call>{{"name": "add", "arguments": {{"x": "1}}}}</tool_call>{rest}', "", calls)
        for rest, calls in (
            ("", [ToolCall("add", '{"x": "1}}"}')]),
            (f"\n{TAGGED}", [ToolCall("add", '{"x": "1}}"}'), ADDED]),
            (' b"}}', [ToolCall("add", '{"x": "1}}</tool_call> b"}')]),
        )
    ],
    (
        '<tool_call>{"name": "add", "arguments": }</tool_call> b',
        '<tool_call>{"name": "add", "arguments": }</tool_call> b',
        [],
    ),
    (
        f'<tool_call>{{"name": "add", "arguments": {{"x": 1}} </tool_call> {TAGGED} }}',
        "}",
        [ToolCall("add", '{"x": 1}'), ADDED],
    ),
    (
        '<tool_call>{"name": "add", "arguments": {"x": "Gra',
        "",
        [ToolCall("add", '{"x": "Gra')],
    ),
    (f"{TAGGED[:-3]}", "", [ADDED]),
    (f"{TAGGED}</tool_call", "</tool_call", [ADDED]),
    # An end tag may be within a string.
    (f"<tool_call>{QUOTING}</tool_call> {TAGGED}", "", [QUOTED, ADDED]),
    (f"<tool_call>{QUOTING}", "", [QUOTED]),
    (
        f'<tool_call>{{"name": "add</tool_call>\n{TAGGED}',
        '<tool_call>{"name": "add</tool_call>',
        [ADDED],
    ),
    (
        f'<tool_call>{{"name": "add</tool_call> and {ADD}',
        f'<tool_call>{{"name": "add</tool_call> and {ADD}',
        [],
    ),
    (
        f'<tool_call>"{"</tool_call>" * 99}"{TAGGED}',
        f'<tool_call>"{"</tool_call>" * 99}"',
        [ADDED],
    ),
    (" " * 9000 + TAGGED, " " * (9000 - 256), [ADDED]),
    ("  \n ", "  \n ", []),
]

LLAMA = [
    ("The answer is {5}.", "The answer is {5}.", []),
    (LLAMA_ADD, "", [ADDED]),
    (ADD, "", [ADDED]),
    *[(text, "" if calls else text, calls) for text, calls in EITHER_KEY],
    (f" \n{LLAMA_ADD} ; {WEATHER}\n", "", [ADDED, ToolCall("get_weather", "{}")]),
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (f"{LLAMA_ADD} and {WEATHER}", f"and {WEATHER}", [ADDED]),
    (f'{LLAMA_ADD};{{"name": "rm"}};{WEATHER}', f'{{"name": "rm"}};{WEATHER}', [ADDED]),
    ('{"name": "add", "para', '{"name": "add", "para', []),
    ("{" * 9000, "{" * 9000, []),
    (INFINITE, "", [ToolCall("add", '{"x": 1e999}')]),
    (" ", " ", []),
    (" " * 300 + WEATHER, " " * 300 + WEATHER, []),
]
