"""docs/operations.md computes correctly, leads to every runbook, and shows the code's defaults."""

import functools
import operator
import re
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from drafter.config import DrafterConfig
from drafter.ngram.params import NgramParams, Tie
from drafter.ngram.text import TOKEN_BYTES, tokens_that_fit
from gateway.config import GatewayConfig
from gateway.errors import ERROR_CODES
from gateway.requests.drafting_policy import TANDEM
from servicekit.config import list_options
from tandem.cli.up import BUNDLED_MODEL
from tests.repository.shown_commands import PAGES, REPOSITORY
from verifier.checkpoint.model_config import read_model_config
from verifier.config import VerifierConfig

PAGE = (REPOSITORY / "docs" / "operations.md").read_text()
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"
OPERATIONS = {"+": operator.add, MINUS: operator.sub, TIMES: operator.mul, "/": operator.truediv}


def value(number: str) -> float:
    return float(number.replace(",", ""))


def computed(expression: str) -> float:
    """From left to right. Sums and products do not mix, so that no precedence is needed."""
    assert not {"+", MINUS} & set(expression) or not {TIMES, "/"} & set(expression), expression
    first, *rest = expression.split()
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return functools.reduce(
        lambda result, pair: OPERATIONS[pair[0]](result, value(pair[1])), pairs, value(first)
    )


EXPRESSIONS: list[tuple[str, str]] = re.findall(
    rf"({NUMBER}(?: [{TIMES}/+{MINUS}] {NUMBER})+) = ({NUMBER})", PAGE
)


@pytest.mark.parametrize(("expression", "result"), EXPRESSIONS)
def test_the_arithmetic_is_right_to_the_shown_digit(expression: str, result: str) -> None:
    num_decimals = len(result.partition(".")[2])
    assert computed(expression) == pytest.approx(value(result), abs=0.5 * 10**-num_decimals)


def test_the_page_has_a_whole_example() -> None:
    assert len(EXPRESSIONS) >= 12
    [blocks] = re.findall(r"= ([\d,]+), so `--num-kv-blocks (\d+)`", PAGE)
    assert value(blocks[0]) == value(blocks[1])


def test_the_bundled_model_has_the_shown_factors() -> None:
    shape = read_model_config(BUNDLED_MODEL)
    assert shape.dtype is not None
    num_bytes = np.dtype(shape.dtype.value).itemsize
    layer = shape.layers[0]
    factors = [2, len(shape.layers), layer.num_kv_heads, layer.head_dim, num_bytes]
    shown = f" {TIMES} ".join(map(str, factors))
    assert f"| the bundled model, bfloat16 | {shown} = " in PAGE


def test_the_drafters_bytes_per_token_are_those_of_its_bound() -> None:
    [shown] = re.findall(r"never more than (\d+) B", PAGE)
    described = DrafterConfig.model_fields["max_sequence_bytes"].description or ""
    assert re.findall(r"(\d+) at most", described) == [shown]
    max_bytes = 1 << 24
    # Which leaves out the free room of the tokens' buffer.
    params = NgramParams(min_ngram=TANDEM.min_ngram, max_ngram=TANDEM.max_ngram, tie=Tie.LONGEST)
    filled = max_bytes / tokens_that_fit(params, max_bytes)
    assert filled < int(shown) < filled + TOKEN_BYTES
    # Gateways ask for an index, unless told otherwise.
    assert TANDEM.tie == "longest"
    computed_of = re.findall(rf"{TIMES} (\d+) / [\d,]+ = [\d.]+ [GM]B at most", PAGE)
    assert computed_of == [shown] * 2


def test_the_page_leads_to_every_runbook() -> None:
    headings = re.findall(
        r"^## (\w+)$", (REPOSITORY / "docs" / "runbooks.md").read_text(), re.MULTILINE
    )
    assert len(headings) > 20
    missing = [each for each in headings if f"(runbooks.md#{each.lower()})" not in PAGE]
    assert missing == []


def test_the_named_graphs_are_those_of_the_dashboards() -> None:
    code = "".join(path.read_text() for path in (REPOSITORY / "deploy" / "grafana").glob("*.py"))
    table = PAGE.partition("## What to look at first")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\*.*?) \|", table, re.MULTILINE)
    assert len(rows) > 5
    for name in re.findall(r"\*([^*]+)\*", " ".join(rows)):
        assert f'"{name}"' in code or f'"Tandem / {name}"' in code, name


def test_each_code_of_an_error_is_the_callers_or_one_to_look_at() -> None:
    [callers] = re.findall(r"^\| \*Errors and moves\* \| none but (.*?) \|", PAGE, re.MULTILINE)
    recording = (REPOSITORY / "deploy" / "prometheus" / "recording.yml").read_text()
    [budget] = set(re.findall(r'tandem_request_errors_total\{code=~"([A-Z_|]+)"', recording))
    # FAILED_PRECONDITION: the model of a resumed request is gone, by a rollout.
    others = {*budget.split("|"), "FAILED_PRECONDITION"}
    assert set(re.findall(r"[A-Z_]{2,}", callers)) == set(ERROR_CODES) - others


@functools.cache
def defaults() -> Mapping[str, set[object]]:
    """The defaults of each flag, of all services that have it."""
    found: dict[str, set[object]] = {}
    for service, config in (
        ("drafter", DrafterConfig),
        ("gateway", GatewayConfig),
        ("verifier", VerifierConfig),
    ):
        for option in list_options(config, service=service):
            if isinstance(option.default, (int, float, str)):
                found.setdefault(option.flag, set()).add(option.default)
    return found


def shown_defaults() -> Iterator[tuple[str, str, str, str]]:
    """Page, flag, number and factor, of texts such as "`--hint-tokens` (64)"."""
    for page in PAGES:
        for flag, number, factor in re.findall(
            rf"`(--[a-z-]+)`(?: \(|, )({NUMBER})( Mi)?(?=\)| by default|[:;,])", page.read_text()
        ):
            if flag in defaults():
                yield page.name, flag, number, factor


def test_shown_defaults_are_those_of_the_code() -> None:
    shown = list(shown_defaults())
    assert shown
    wrong = [
        (page, flag, number)
        for page, flag, number, factor in shown
        if value(number) * (2**20 if factor else 1) not in defaults()[flag]
    ]
    assert wrong == []
