"""Texts of models, and the calls in them.

Each case is a text, what of it is shown, and the calls that it holds.
"""

# ruff: noqa: RUF001 - DeepSeek's marks have bars of full width.

import json
from typing import Any, NamedTuple

from gateway.text.tool_calls import ToolCallForm


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


# As their templates teach the models; and what these make of it.
OTHERS: dict[ToolCallForm, list[tuple[str, str, list[ToolCall]]]] = {
    ToolCallForm.QWEN3_XML: [
        (
            "I see.\n\n<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n"
            '<parameter=text>\nif a < b:\n    say("é")\n\n</parameter>\n</function>\n</tool_call>',
            "I see.",
            [ToolCall("add", '{"x": 1, "text": "if a < b:\\n    say(\\"é\\")\\n"}')],
        ),
        (
            "<tool_call><function=get_weather></function></tool_call>\n"
            "<tool_call><function=add><parameter=more>{'a': 1}</parameter>"
            "<parameter=text></parameter></function></tool_call> b",
            "b",
            [
                ToolCall("get_weather", "{}"),
                ToolCall("add", """{"more": "{'a': 1}", "text": ""}"""),
            ],
        ),
        # Of a value that may be a string, what is sound JSON of another type is no string.
        *[
            (
                f"<tool_call><function=add><parameter=more>{value}</parameter></function>",
                "",
                [ToolCall("add", f'{{"more": {written}}}')],
            )
            for value, written in (
                ("null", "null"),
                ('{"a": [1]}', '{"a": [1]}'),
                ("12", '"12"'),
                ('"12"', '"\\"12\\""'),
            )
        ],
        # Nothing is known of these; what no schema says may be anything.
        *[
            (
                f"<tool_call><function=get_weather><parameter=a>{value}</parameter></function>",
                "",
                [ToolCall("get_weather", f'{{"a": {written}}}')],
            )
            for value, written in (
                ("True", "true"),
                ("None", "null"),
                ("Oslo", '"Oslo"'),
                ("1e5", "1e5"),
                ("[1, 2,]", "[1, 2]"),
                ("", '""'),
            )
        ],
        # What is not of the form belongs to a call that has begun.
        (
            "<tool_call><function=add> so <b> <parameter=x>1</parameter></function>",
            "",
            [ToolCall("add", '{"x": 1}')],
        ),
        ("<tool_call><function=add></tool_call>b", "b", [ToolCall("add", "{}")]),
        # A value may hold tags: it ends where what follows belongs to a call.
        (
            "<tool_call><function=add><parameter=text></parameter> x </function> <parameter=y> "
            "</tool_call></parameter></function></tool_call>",
            "",
            [ToolCall("add", '{"text": "</parameter> x </function> <parameter=y> </tool_call>"}')],
        ),
        (
            f"<tool_call><function=add><parameter=text>a</parameter>{' ' * 700}</function>"
            "<parameter=x>1</parameter></function></tool_call>",
            "",
            [
                ToolCall(
                    "add",
                    json.dumps({"text": f"a</parameter>{' ' * 700}</function><parameter=x>1"}),
                )
            ],
        ),
        # Ends that a model left out.
        *[
            (
                f"<tool_call><function=add><parameter=x>\n1\n{rest}",
                "",
                [ToolCall("add", '{"x": 1}')],
            )
            for rest in (
                "</parameter></tool_call>",
                "</function>\n</tool_call>",
                "</parameter>\n</function>\n",
                "</parameter>\n",
                "</parameter>\n</func",
            )
        ],
        # Cut.
        (
            "<tool_call>\n<function=add>\n<parameter=text>\nGra</para",
            "",
            [ToolCall("add", '{"text": "Gra</para')],
        ),
        (
            "<tool_call>\n<function=add>\n<parameter=x>\n1",
            "",
            [ToolCall("add", '{"x": ')],
        ),
        # No call of a given tool.
        (
            "x <tool_call><function=rm></function></tool_call> y",
            "x <tool_call><function=rm></function></tool_call> y",
            [],
        ),
        ("the tag <tool_call> is", "the tag <tool_call> is", []),
        (
            f"<tool_call>{' z' * 400}<tool_call><function=get_weather></function></tool_call>",
            f"<tool_call>{' z' * 400}",
            [ToolCall("get_weather", "{}")],
        ),
        (TAGGED, "", [ADDED]),
    ],
    ToolCallForm.GLM45: [
        (
            "Hm.<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
            "<arg_key>text</arg_key>\n<arg_value>a\nb</arg_value>\n</tool_call>",
            "Hm.",
            [ToolCall("add", '{"x": 1, "text": "a\\nb"}')],
        ),
        ("<tool_call>get_weather\n</tool_call>", "", [ToolCall("get_weather", "{}")]),
        ("<tool_call>rm\n</tool_call>", "<tool_call>rm\n</tool_call>", []),
        (
            "<tool_call>get_weather</tool_call>\n<tool_call>add<arg_key>x</arg_key>"
            "<arg_value>-2</arg_value></tool_call>",
            "",
            [ToolCall("get_weather", "{}"), ToolCall("add", '{"x": -2}')],
        ),
    ],
    ToolCallForm.MISTRAL: [
        ('[TOOL_CALLS]add[ARGS]{"x": 1}', "", [ToolCall("add", '{"x": 1}')]),
        (
            'So. [TOOL_CALLS]add[CALL_ID]a1B2[ARGS]{"x": 1}[TOOL_CALLS]get_weather[ARGS]{} b',
            "So. b",
            [ToolCall("add", '{"x": 1}'), ToolCall("get_weather", "{}")],
        ),
        (f"[TOOL_CALLS][{ADD}, {WEATHER}]", "", [ADDED, ToolCall("get_weather", "{}")]),
        (f"[TOOL_CALLS] [{ADD}]\nb", "b", [ADDED]),
        ("[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
        ("[TOOL_CALLS", "[TOOL_CALLS", []),
        ('[TOOL_CALLS]add[ARGS]{"text": "a', "", [ToolCall("add", '{"text": "a')]),
        ("[TOOL_CALLS]add[ARGS]none", "none", [ToolCall("add", "{}")]),
    ],
    ToolCallForm.DEEPSEEK_V3: [
        (
            "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"x": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
            "get_weather\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "So.",
            [ToolCall("add", '{"x": 1}'), ToolCall("get_weather", "{}")],
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
            '{"x": 1, "text": "<b> <｜tool▁call▁end｜>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>b',
            "b",
            [ToolCall("add", '{"x": 1, "text": "<b> <｜tool▁call▁end｜>"}')],
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
            '{"x": [1<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            [ToolCall("add", '{"x": [1]}')],
        ),
        # Of several, what is no given tool is left out.
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            '<｜tool▁call▁begin｜>rm<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
            '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            [ToolCall("add", "{}"), ToolCall("add", '{"x": 2}')],
        ),
    ],
    ToolCallForm.KIMI_K2: [
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
            '<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|><|tool_call_begin|>'
            "functions.get_weather:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            "",
            [ToolCall("add", '{"x": 1}'), ToolCall("get_weather", "{}")],
        ),
    ],
    ToolCallForm.PYTHONIC: [
        (
            """[add(x=1, text='a]("', more={"a": [None, true]}), get_weather()]""",
            "",
            [
                ToolCall("add", '{"x": 1, "text": "a](\\"", "more": {"a": [null, true]}}'),
                ToolCall("get_weather", "{}"),
            ],
        ),
        ("\n[get_weather()] b", "b", [ToolCall("get_weather", "{}")]),
        ("[1, 2]", "[1, 2]", []),
        *[
            (text, text, [])
            for text in (
                "See [add(x=1)]",
                "[add(1)]",
                "[add(x=y)]",
                "[add(x=f())]",
                "[add(x=1), rm()]",
                "[add(**{})]",
                "[add(x=(1,))]",
                "[add(x=1e999)]",
                "[add(x=1",
                "[add(x='a]",
                "[]",
                "[add(x=b'a')]",
                "[add(x=1, x=2)]",
                "[%s]" % ("-" * 2000 + "1"),
                "[add(x=[" + "1," * 3000 + "])]",
            )
        ],
    ],
}


CASES = [
    *[(ToolCallForm.HERMES, *case) for case in HERMES],
    *[(ToolCallForm.LLAMA3_JSON, *case) for case in LLAMA],
    *[(form, *case) for form, those in OTHERS.items() for case in those],
]
