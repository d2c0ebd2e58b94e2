"""Generated chat templates give the text that transformers gives, or are an error in both.

They hold every tag, filter, test and global that a chat template may use. Conversations are left
to `test_chat_template.py`: here a template's values are its variables.
"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.text.chat_template import ChatTemplate, ChatTemplateError
from tests.volume import examples

WORD = "hi"
MESSAGES = [{"role": "user", "content": WORD}]
VARIABLES: dict[str, Any] = {
    "text": '  one <b>two</b>\n\nthree & "é" \U0001f642 http://a.b  ',
    "number": -7,
    "ratio": 2.5,
    "yes": True,
    "nothing": None,
    "items": [3, 1, 2, 1],
    "records": [
        {"role": "a", "size": 2, "inner": {"k": [1, "ü"]}},
        {"role": "B", "size": 1},
    ],
    "table": {"b": 1.0, "a": [True, None, "é<"], "C": {"x": "'"}},
}

# What a value may be, by what can be done with it.
SOURCES = {
    "text": ("text", "x", "bos_token", "'a\\nb'", "'é\"<'", "text[2:9]", "''", "m(1)", "x ~ '|'"),
    "number": ("number", "ratio", "2", "1e3", "number // 2", "ns.a", "text | length", "7 % 4"),
    "list": ("items", "y", "[]", "(1, 'b')", "items[1:]", "items + [2]", "range(3)"),
    "records": ("records", "records[:1]", "records[::-1]"),
    "table": ("table", "records[0]", "{}", "{'a': true, 'b': {1: 'x'}}", "dict(table, z=number)"),
    "other": (
        "none", "true", "missing", "missing.at", "ns", "nothing", "loop", "caller", "items[-1]",
        "records[0].inner.k", "table.get('a')", "number < 2 <= 3", "1 in items", "2 not in items",
        "text or 1", "text.split()",
        "yes and not nothing", "'y' if yes else 'n'", "'y' if nothing", "text.upper()",
        "dict.fromkeys('ab', number)", "dict is mapping", "cycler(1, 2).next()",
        "joiner('-')() ~ joiner()()", "lipsum(n=0)", "namespace(a=number, self=1).self",
        "namespace({1: 2})", "strftime_now('%%d')", "strftime_now(format='%Y') | length",
    ),
    "refused": (
        "range(100001)", "dict.keys(table)", "dict.mro()", "namespace(__class__=1)", "1 // 0",
        "namespace({'_a': 1})", "strftime_now(number)", "raise_exception('refused')",
        "raise_exception(message='refused')", "raise_exception()", "items.append(1)",
        "text.__class__", "table.update(a=1)", "text | missing", "1 is divisibleby 0", "dict is is",
    ),
}  # fmt: skip

# What each filter is for, and its arguments.
FILTERS = {
    "abs": ("number", ("",)),
    "attr": ("records", ("('role')", "('_x')")),
    "batch": ("list", ("(2)", "(3, '-')")),
    "center": ("text", ("", "(9)")),
    "dictsort": ("table", ("", "(true)", "(reverse=true)")),
    "filesizeformat": ("number", ("", "(true)")),
    "float": ("text", ("", "(1.5)")),
    "format": ("text", ("",)),
    "groupby": ("records", ("('role')", "('size', default=0)")),
    "indent": ("text", ("", "(2)", "('> ', true)", "(1, blank=true)")),
    "int": ("text", ("", "(5)", "(0, 16)")),
    "items": ("table", ("",)),
    "join": ("list", ("", "(', ')", "('|', attribute='role')")),
    "map": ("records", ("('upper')", "(attribute='role')", "(attribute='z', default='-')")),
    "max": ("list", ("", "(attribute='size')", "(true)")),
    "min": ("list", ("", "(attribute='size')")),
    "reject": ("list", ("", "('odd')", "('equalto', 1)")),
    "rejectattr": ("records", ("('inner')", "('size', 'gt', 1)")),
    "replace": ("text", ("('e', '<')", "('e', '', 1)")),
    "reverse": ("list", ("",)),
    "round": ("number", ("", "(1)", "(0, 'floor')", "(method='ceil')")),
    "select": ("list", ("", "('string')", "('in', [1, 'one'])")),
    "selectattr": ("records", ("('inner', 'defined')", "('role', 'equalto', 'a')")),
    "slice": ("list", ("(2)", "(3, 0)")),
    "sort": ("list", ("", "(reverse=true)", "(case_sensitive=true)")),
    "sum": ("list", ("", "(start=1)")),
    "tojson": ("table", (
        "", "(true)", "(indent=2)", "(indent=0)", "(indent='..')", "(ensure_ascii=true)",
        "(separators=(',', ':'))", "(sort_keys=true)", "(false, none, none, true)",
        "(indent=1, separators=(' ,', '='), sort_keys=true, ensure_ascii=false)", "(other=1)",
    )),
    "trim": ("text", ("", "(' o')")),
    "truncate": ("text", ("(9)", "(5, true, '..')", "(5, false, '', 0)")),
    "unique": ("list", ("", "(true)")),
    "urlize": ("text", ("", "(9, nofollow=true)")),
    "wordwrap": ("text", ("(7)", "(5, false, '/')")),
    "xmlattr": ("table", ("", "(false)")),
    **dict.fromkeys(("d", "default"), ("other", ("('-')", "('-', true)"))),
    **dict.fromkeys(("count", "first", "last", "length", "list"), ("list", ("",))),
    **dict.fromkeys(("e", "escape", "forceescape", "pprint", "string"), ("other", ("",))),
    **dict.fromkeys(("capitalize", "lower", "title", "upper"), ("text", ("",))),
    **dict.fromkeys(("safe", "striptags", "urlencode", "wordcount"), ("text", ("",))),
}  # fmt: skip
# They give a generator, which would show its address.
LAZY_FILTERS = ("batch", "items", "map", "reject", "rejectattr", "reverse", "select",
                "selectattr", "slice", "unique")  # fmt: skip

TESTS = {
    "divisibleby": ("number", (" 2", "(number)")),
    "in": ("number", (" [1, none, 'one']", " items")),
    **dict.fromkeys(("even", "odd"), ("number", ("",))),
    **dict.fromkeys(("filter", "lower", "test", "upper"), ("text", ("",))),
    **dict.fromkeys(
        ("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable",
         "mapping", "none", "number", "sequence", "string", "true", "undefined"),
        ("other", ("",)),
    ),
    **dict.fromkeys(("eq", "equalto", "ne", "sameas"), ("other", (" 1", "(none)", "(text)"))),
    **dict.fromkeys(("ge", "greaterthan", "gt", "le", "lessthan", "lt"), ("number", (" 1",))),
}  # fmt: skip


def rarely(draw: st.DrawFn, one_in: int) -> bool:
    return draw(st.integers(1, one_in)) == one_in


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Mostly sound ones, as an error ends a template."""

    def source(kind: str) -> str:
        if rarely(draw, 30):
            kind = draw(st.sampled_from(list(SOURCES)))
        return draw(st.sampled_from(SOURCES[kind]))

    what = draw(st.sampled_from(("source", "filter", "filter", "test")))
    if what == "source":
        kinds = [kind for kind in SOURCES if kind != "refused"]
        return source(draw(st.sampled_from(kinds)))
    if what == "test":
        name = draw(st.sampled_from(list(TESTS)))
        kind, arguments = TESTS[name]
        word = draw(st.sampled_from(("is", "is not")))
        return f"({source(kind)}) {word} {name}{draw(st.sampled_from(arguments))}"
    name = draw(st.sampled_from(list(FILTERS)))
    kind, arguments = FILTERS[name]
    value = f"({source(kind)}) | {name}{draw(st.sampled_from(arguments))}"
    if name in LAZY_FILTERS:
        value += " | list"
    return value + draw(st.sampled_from(("", "", " | string", " | pprint", " | tojson", " ~ '.'")))


BEGINS = st.sampled_from(("{%", "{%-", "{%+"))
ENDS = st.sampled_from(("%}", "-%}", "+%}"))
SHOWN = st.sampled_from(("{{ %s }}", "{{- %s }}", "{{ %s -}}", "{{- %s -}}"))
TEXTS = st.sampled_from(
    ("", " ", "\n", "\n\n", "  \n\t", "a", "<b>", "  c\n", "\n d ", "{# note #}", "\n  {#- n -#}\n")
)
FLAT = ("show", "show", "set", "several", "namespace", "control", "raw", "call", "include")
NESTED = ("if", "for", "set block", "macro", "with", "filter", "generation", "caller", "block")
NAMES = st.sampled_from(("x", "y"))
LOOPS = (
    "x in items", "x in range(3)", "k, x in table.items()", "x in items if x > 1", "x in missing",
    "x in [[1, []], [2, []]] recursive",
)  # fmt: skip
REFUSED = ("do 1", "trans", "debug", "include 'a'", "import 'a' as b", "extends 'a'", "endfor")

# Takes the place of a name, as no two blocks may have the same one.
BLOCK = "BLOCK"


@st.composite
def statements(draw: st.DrawFn, depth: int, in_loop: bool) -> str:
    def tag(inside: str) -> str:
        return f"{draw(BEGINS)} {inside} {draw(ENDS)}"

    def value() -> str:
        return draw(expressions())

    def one_of(*values: str) -> str:
        return draw(st.sampled_from(values))

    def body(*, loops: bool = in_loop) -> str:
        return draw(bodies(depth - 1, loops))

    def block(begin: str, *, loops: bool = in_loop) -> str:
        return tag(begin) + body(loops=loops) + tag("end" + begin.split("(")[0].split()[0])

    # No loop control leaves a function; one that tries is an error.
    leaves = in_loop and rarely(draw, 10)
    match draw(st.sampled_from(FLAT + NESTED * 2 if depth else FLAT)):
        case "set":
            return tag(f"set {draw(NAMES)} = {value()}")
        case "several":
            return tag(f"set x, y = {value()}, {value()}")
        case "namespace":
            return tag("set " + one_of("ns = namespace(a=1)", "ns.a = ns.a + 1", "ns.b = x"))
        case "control" if in_loop:
            return tag(f"if ({value()})") + tag(one_of("break", "continue")) + tag("endif")
        case "raw":
            return "{%- raw %}{{ x }} {% if %}{% endraw -%}"
        case "call":
            return tag("call m(1)") + draw(SHOWN) % "x" + tag("endcall")
        case "include" if rarely(draw, 20):
            return tag(one_of(*REFUSED))
        case "if":
            middle = one_of("", "else", f"elif ({value()})")
            other = tag(middle) + body() if middle else ""
            return tag(f"if ({value()})") + body() + other + tag("endif")
        case "for":
            shown = draw(SHOWN) % one_of("loop.index", "loop.last", "x", "loop.changed(x)", "k")
            again = "{{ loop(x[1:]) if loop.depth < 3 and x is sequence }}"
            over = one_of(*LOOPS)
            inner = body(loops=True) + shown + again * over.endswith("recursive")
            other = tag("else") + body(loops=False) if draw(st.booleans()) else ""
            return tag(f"for {over}") + inner + other + tag("endfor")
        case "set block":
            return block(f"set {draw(NAMES)}{one_of('', ' | upper', ' | tojson')}")
        case "macro":
            return block(f"macro m({one_of('x', 'x=1, y=none')})", loops=leaves)
        case "with":
            return block(f"with y = {value()}")
        case "filter":
            return block(f"filter {one_of('upper', 'indent', 'tojson')}")
        case "caller":
            return block(one_of("call m(1)", "call(x) m(2)"), loops=leaves)
        case "block":
            return block(f"block {BLOCK}{one_of('', ' scoped')}", loops=leaves)
        case "generation":
            return block("generation", loops=leaves)
    return draw(SHOWN) % value()


@st.composite
def bodies(draw: st.DrawFn, depth: int, in_loop: bool = False) -> str:
    pieces = st.tuples(TEXTS, statements(depth, in_loop), TEXTS).map("".join)
    return "".join(draw(st.lists(pieces, min_size=1, max_size=3)))


PRELUDE = (
    "{% set x, y, ns = 'X', [1, 'z'], namespace(a=1) %}"
    "{% macro m(x=0) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}"
)


@st.composite
def templates(draw: st.DrawFn) -> str:
    # It shows the message, so that it is given as text.
    template = "{{ messages[0].content }}" + PRELUDE + draw(bodies(3))
    first, *others = template.split(BLOCK)
    return first + "".join(f"b{number}{each}" for number, each in enumerate(others))


@given(templates())
@settings(max_examples=examples(800), deadline=None)
def test_any_template_renders_as_in_transformers(template: str) -> None:
    expected: str | None
    try:
        rendered = render_jinja_template(
            [MESSAGES],
            chat_template=template,
            add_generation_prompt=True,
            bos_token="<s>",
            **VARIABLES,
        )
        expected = rendered[0][0]
    except Exception:
        expected = None
    try:
        ours = ChatTemplate({"default": template}, {"bos_token": "<s>"})
        text = ours.render(MESSAGES, variables=VARIABLES)
    except ChatTemplateError:
        assert expected is None
    else:
        assert text == expected
