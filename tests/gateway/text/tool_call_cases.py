"""Texts of models, and the calls in them: of each form, as in `json_call_cases.py`."""

# ruff: noqa: RUF001 - DeepSeek's marks have bars of full width.

import json

from gateway.text.tool_calls import ToolCallForm
from tests.gateway.text.json_call_cases import (
    ADD,
    ADDED,
    HERMES,
    LLAMA,
    TAGGED,
    WEATHER,
    ToolCall,
)

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
    ToolCallForm.GRANITE: [
        (f"<|tool_call|>[{ADD}]", "", [ADDED]),
        (f"<|tool_call|> [\n{ADD},\n{WEATHER}\n]", "", [ADDED, ToolCall("get_weather", "{}")]),
        # Of some, the mark is a text.
        (f"Let me see.\n<tool_call>[{ADD}]\nSo.", "Let me see.So.", [ADDED]),
        (f"<tool_call> {ADD}", "", [ADDED]),
        (
            "the marks <|tool_call|> and <tool_call> are",
            "the marks <|tool_call|> and <tool_call> are",
            [],
        ),
        ('<|tool_call|>[{"name": "rm"}]', '<|tool_call|>[{"name": "rm"}]', []),
        ('<|tool_call|>[{"name": "add", "arguments": {"x": 1', "", [ToolCall("add", '{"x": 1')]),
    ],
    ToolCallForm.OLMO3: [
        (
            "So.\n<function_calls>\n"
            """add(x=1, text='a](</function_calls>"', more={"a": [None, true]})\n"""
            "get_weather()\n</function_calls> b",
            "So. b",
            [
                ToolCall(
                    "add",
                    '{"x": 1, "text": "a](</function_calls>\\"", "more": {"a": [null, true]}}',
                ),
                ToolCall("get_weather", "{}"),
            ],
        ),
        ("<function_calls>add(\n    x=1,\n)</function_calls>", "", [ToolCall("add", '{"x": 1}')]),
        # The end tag is cut, or left out.
        *[
            (f"<function_calls>get_weather(){rest}", "", [ToolCall("get_weather", "{}")])
            for rest in ("", "\n", "\n</func")
        ],
        # A call that must come is JSON.
        (f"<function_calls>\n{ADD}\n</function_calls>", "", [ADDED]),
        *[
            (text, text, [])
            for text in (
                "the tag <function_calls> is",
                "<function_calls></function_calls>",
                "<function_calls>rm(x=1)</function_calls>",
                "<function_calls>get_weather()\nrm(x=1)</function_calls>",
                "<function_calls>x = get_weather()</function_calls>",
                "<function_calls>add(x=1",
                "<function_calls>add(text='</function_calls>",
                # More than is parsed; the first 683 calls would be sound.
                "<function_calls>%s</function_calls>" % ("get_weather()\n" * 700),
            )
        ],
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
