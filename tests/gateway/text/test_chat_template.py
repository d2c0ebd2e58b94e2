"""Chat templates: rendered as transformers renders them, found where it finds them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from gateway.text.chat_template import (
    MAX_RENDERED_CHARACTERS,
    ChatTemplate,
    ChatTemplateError,
    RenderedTooLongError,
)
from servicekit.config import ConfigError, ServerOptions
from servicekit.logs import Logger

# The features that templates of published models use.
CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'tool' and loop.first %}{% continue %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.arguments | tojson(indent=2, sort_keys=true) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- ns.turns }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}
{%- endif %}"""

LLAMA = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate!') }}
{% endif %}
{% generation %}
{{ message['content'].split('|')[0] + (eos_token or '') }}
{% endgeneration %}
{% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now('%Y') | length }} {{ dict(a=1) | tojson }}"""

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "  <b>hé</b> & \U0001f642 "},
    {
        "role": "assistant",
        "content": "x|y",
        "tool_calls": [{"function": {"name": "f", "arguments": {"b": [1, "ü"], "a": None}}}],
    },
]
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"<x>": "&'\""}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": FUNCTION}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["", "thinking"])
def test_it_renders_as_transformers_does(
    template: str, tools: list[dict[str, Any]] | None, variables: dict[str, Any]
) -> None:
    given: dict[str, Any] = {**SPECIAL, **variables, "tools": tools}
    rendered = render_jinja_template(
        conversations=[CONVERSATION],
        chat_template=template,
        add_generation_prompt=True,
        **given,
    )
    ours = ChatTemplate({"default": template}, SPECIAL)
    assert ours.render(CONVERSATION, tools=tools, variables=variables) == rendered[0][0]


def test_tools_have_the_other_name_too_that_some_templates_know() -> None:
    template = ChatTemplate(
        {"default": "{% for t in xml_tools or () %}{{ t.name }}{% endfor %}"}, {}
    )
    assert template.render(CONVERSATION, tools=[{"name": "f"}]) == "f"
    assert template.render(CONVERSATION) == ""
    own = {"xml_tools": [{"name": "g"}]}
    assert template.render(CONVERSATION, tools=[{"name": "f"}], variables=own) == "g"


# As gpt-oss's, where a macro reads it, too.
EFFORT = """{%- macro head() %}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- "Reasoning: " + reasoning_effort }}
{%- endmacro %}
{{- head() }}"""
THINKING = "{{ 'on' if thinking is defined and thinking else 'off' }}"


@pytest.mark.parametrize(
    ("template", "effort", "variables", "shown"),
    [
        (EFFORT, "", {}, "Reasoning: medium"),
        (EFFORT, "low", {}, "Reasoning: low"),
        (EFFORT, "low", {"reasoning_effort": "high"}, "Reasoning: high"),
        (CHATML, "none", {}, "<think></think>"),
        (CHATML, "none", {"enable_thinking": True}, "assistant\n"),
        (CHATML, "low", {}, "assistant\n"),
        (THINKING, "none", {}, "off"),
        (THINKING, "minimal", {}, "on"),
        ("{{ bos_token }}", "none", {}, "<s>"),
    ],
)
def test_a_template_is_told_how_much_to_reason(
    template: str, effort: str, variables: dict[str, Any], shown: str
) -> None:
    """By the variable that it reads, which a caller may set itself."""
    ours = ChatTemplate({"default": template}, SPECIAL)
    text = ours.render(CONVERSATION, variables=variables, reasoning_effort=effort)
    assert text.endswith(shown)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "Roles must alternate!"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "_x"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_does_not_accept_is_an_error(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate({"default": template}, {}).render(CONVERSATION)


# 60 bytes for each number of the innermost list.
NESTED = json.loads("[" * 15 + "0" + ",0" * 199_999 + "]" * 15)
HALF = "x" * (MAX_RENDERED_CHARACTERS // 2)


@pytest.mark.parametrize(
    ("template", "tools", "variables"),
    [
        ("{{ tools | tojson(indent=4) | length }}", [{"parameters": NESTED}], {}),
        (
            "{% for message in messages if message == messages[0] %}"
            "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endfor %}"
            "{{ raise_exception('too late') }}",
            [{"description": HALF}],
            {},
        ),
        (
            "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
            "{{ raise_exception('too late') }}",
            None,
            {"eos_token": HALF},
        ),
        (
            "{% macro twice(text) %}{{ text }}{{ text }}.{% endmacro %}{{ twice(half) | length }}",
            None,
            {"half": HALF},
        ),
        (
            "{% set text %}{{ half }}{{ half }}.{% endset %}{{ text | length }}",
            None,
            {"half": HALF},
        ),
    ],
    ids=["indents", "tools per message", "variable per message", "macro", "block"],
)
def test_a_text_that_a_template_makes_too_long_is_refused_before_it_is_whole(
    template: str, tools: list[dict[str, Any]] | None, variables: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "hi"}] * 3
    with pytest.raises(RenderedTooLongError):
        ChatTemplate({"default": template}, {}).render(messages, tools=tools, variables=variables)


SHOW_PARTS = (
    "{% for part in message.content %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}"
)
EITHER = "{% if message.content is string %}{{ message.content }}{% else %}PARTS{% endif %}"
CALLS = "{% for call in message.tool_calls %}{{ call.function.name }}"
OBJECT = CALLS + "{{ call.function.arguments | tojson }}{% endfor %}"
TEXT = CALLS + "{{ '=' + call.function.arguments }}{% endfor %}"
ONLY_NONE = "{% if message.content is none %}%s{% else %}{{ message.content }}{% endif %}"
SAYS = "{{ message.content is none }}"
REFUSES = "{% if messages | length != 4 %}{{ raise_exception('begin with a system') }}{% endif %}"

SPOKEN: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "ü"}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": ""},
]


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("{{ message.content }}", "hi||2|"),
        (SHOW_PARTS, "hi||2|"),
        (EITHER, "hi||2|"),
        ("{{ message.content | capitalize }}", "Hi||2|"),
        (SHOW_PARTS + OBJECT, 'hi|f{"a": "ü"}|2|'),
        ("{{ message.content }}" + OBJECT, 'hi|f{"a": "ü"}|2|'),
        ("{{ message.content }}" + TEXT, 'hi|f={"a": "ü"}|2|'),
        (ONLY_NONE.replace("%s", OBJECT), 'hi|f{"a": "ü"}|2|'),
        (ONLY_NONE.replace("%s", TEXT), 'hi|f={"a": "ü"}|2|'),
        (ONLY_NONE.replace("%s", OBJECT) + REFUSES, "hi||2|"),
        (EITHER + REFUSES, "hi||2|"),
        (SAYS + OBJECT, 'False|Falsef{"a": "ü"}|False|False'),
    ],
    ids=[
        "text",
        "parts",
        "text or parts",
        "other case",
        "parts, objects",
        "text, objects",
        "text, JSON",
        "none, objects",
        "none, JSON",
        "calls, refuses the probe",
        "parts, refuses the probe",
        "none is not needed",
    ],
)
def test_a_template_gets_messages_in_the_form_that_it_reads(body: str, shown: str) -> None:
    source = (
        "{% for message in messages %}" + body + "{% if not loop.last %}|{% endif %}{% endfor %}"
    )
    before = copy.deepcopy(SPOKEN)
    assert ChatTemplate({"default": source}, {}).render(SPOKEN) == shown
    assert before == SPOKEN, "they stay as they are"


def test_each_of_a_models_templates_has_a_form_of_its_own() -> None:
    sources = {
        "default": "{{ messages[0].content }}",
        # Fails without tools.
        "tool_use": "{{ tools[0]['type'] }} {{ messages[0].content[0]['text'] }}",
    }
    template = ChatTemplate(sources, {})
    assert template.render(SPOKEN) == "hi"
    assert template.render(SPOKEN, tools=TOOLS) == "function hi"


def write(folder: Path, config: dict[str, Any], **files: str) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "additional_chat_templates").mkdir()
    for name, content in files.items():
        inside = "additional_chat_templates/" if name != "chat_template" else ""
        (folder / f"{inside}{name}.jinja").write_text(content)
    return folder


@pytest.mark.parametrize(
    ("config", "files", "plain", "with_tools"),
    [
        ({"chat_template": "a"}, {}, "a", "a"),
        ({"chat_template": "a"}, {"chat_template": "b"}, "b", "b"),
        ({}, {"chat_template": "b", "tool_use": "c"}, "b", "c"),
        (
            {
                "chat_template": [
                    {"name": "default", "template": "d{{ eos_token }}"},
                    {"name": "tool_use", "template": "t{{ bos_token }}"},
                ],
                "eos_token": {"content": "<e>"},
                "bos_token": "<b>",
            },
            {},
            "d<e>",
            "t<b>",
        ),
    ],
)
def test_templates_are_found_where_models_keep_them(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], plain: str, with_tools: str
) -> None:
    template = ChatTemplate.load(write(tmp_path, config, **files))
    assert template is not None
    assert template.render(CONVERSATION) == plain
    assert template.render(CONVERSATION, tools=TOOLS) == with_tools


@pytest.mark.parametrize("config", [{"chat_template": 5}, {"chat_template": "{% if %}"}, []])
async def test_a_template_that_cannot_be_used_is_found_at_the_start(
    model_folder: Path, tmp_path: Path, config: Any, registry: Any, logger: Logger
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(model_folder / "tokenizer.json")
    write(tmp_path, config)
    with pytest.raises(ConfigError) as caught:
        GatewayServer(
            GatewayConfig(
                server=ServerOptions(listen="127.0.0.1:0"),
                verifiers=["127.0.0.1:1"],
                tokenizer=[tmp_path],
            ),
            registry=registry,
            logger=logger,
        )
    assert caught.value.key == "--tokenizer"
