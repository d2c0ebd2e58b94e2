"""The page in a real Chromium, in front of the real services and the bundled model."""

import contextlib
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog
from playwright.async_api import Browser, Route, expect
from playwright.async_api import Error as BrowserError
from prometheus_client import CollectorRegistry

from examples.demo_model.dataset import rename_identifier
from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from tests.gateway.clients import write_clients
from tests.integration.pausable_model import PausableModel
from tests.integration.stack import (
    LOOPBACK,
    MODEL,
    REPOSITORY,
    Stack,
    running_stack,
    verifier_config,
    wait_until,
)
from tests.page.browser import CHROMIUM, run_to_end, running_chromium, wait_until_usable
from tests.page.visits import Visit, begin_visit
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no Chromium on this machine; .ci/run installs it, as root on Debian",
    ),
]

SAMPLES = REPOSITORY / "gateway" / "page" / "static" / "samples.json"
RENAMES: list[dict[str, Any]] = json.loads(SAMPLES.read_text())["renames"]
# The sample of which many drafts are rejected.
HARD_SAMPLE = next(sample["title"] for sample in RENAMES if "rejected" in sample["title"])


TIMES = "\N{MULTIPLICATION SIGN}"
HTML = "<script>document.title = 1</script><img src=x onerror='document.title = 2'>"


@pytest.fixture(scope="module")
def models() -> list[PausableModel]:
    """The stack's model."""
    return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(models: list[PausableModel]) -> AsyncIterator[Stack]:
    def load(config: VerifierConfig) -> LoadedModel:
        loaded = load_model(config)
        models.append(PausableModel(loaded.model))
        return dataclasses.replace(loaded, model=models[0])

    async with running_stack(
        # Each step waits for its drafts, so that it has the same ones on a busy machine.
        verifier=verifier_config(allow_trace=True, draft_deadline_s=60.0),
        gateway={"allow_trace": True, "draft_wait": "always"},
        load=load,
    ) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_chromium() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def visit(browser: Browser, stack: Stack) -> AsyncIterator[Visit]:
    """A visit to the stack's page, in which nothing may go wrong and no other host is asked."""
    async with faultless_visit(browser, stack.gateway.http_address) as visit:
        yield visit


@contextlib.asynccontextmanager
async def faultless_visit(browser: Browser, address: str | None) -> AsyncIterator[Visit]:
    visit = await begin_visit(browser, address)
    yield visit
    await visit.page.context.close()
    assert visit.messages == []
    assert visit.hosts == {address}


@contextlib.asynccontextmanager
async def another_gateway(stack: Stack, **options: Any) -> AsyncIterator[GatewayServer]:
    """One with other options, in front of the stack's services."""
    gateway = GatewayServer(
        GatewayConfig.model_validate(
            {
                "server": LOOPBACK,
                "http_listen": "127.0.0.1:0",
                "tokenizer": [MODEL],
                "drafters": [stack.drafter.server.address],
                "verifiers": [stack.verifier.server.address],
                "draft_wait": "always",
                **options,
            }
        ),
        registry=CollectorRegistry(),
        logger=structlog.wrap_logger(None, processors=[structlog.testing.LogCapture()]),
    )
    try:
        await gateway.start()
        await gateway.wait_until_serving()
        yield gateway
    finally:
        await gateway.stop()


async def test_every_sample_is_renamed_alike_on_both_sides(visit: Visit) -> None:
    for sample in RENAMES:
        await visit.page.select_option("#sample", sample["title"])
        assert "The texts are the same" in await run_to_end(visit.page)
        code = "\n".join(sample["source"]) + "\n"
        expected = rename_identifier(code, sample["old"], sample["new"])
        assert await visit.page.text_content("#on-text") == expected, sample["title"]
        assert await visit.page.text_content("#off-text") == expected, sample["title"]


async def test_numbers_are_those_of_usage_and_metrics(visit: Visit, stack: Stack) -> None:
    def drafts() -> tuple[float, float]:
        prefix = "tandem_spec_decode_num"
        return (
            stack.metric("gateway", f"{prefix}_draft_tokens_total"),
            stack.metric("gateway", f"{prefix}_accepted_tokens_total"),
        )

    before = drafts()
    said = await run_to_end(visit.page)
    after = drafts()
    for index, side in ((1, "on"), (2, "off")):
        usage = (await visit.chunks(index))[-1]["usage"]
        speculation = usage["speculation"]
        assert await visit.number(f"{side}-tokens") == str(usage["completion_tokens"])
        assert await visit.number(f"{side}-steps") == str(speculation["num_steps"])
        assert await visit.number(f"{side}-drafted") == str(speculation["num_draft_tokens"])
        assert await visit.number(f"{side}-accepted") == str(speculation["num_accepted_tokens"])
        assert (f"With speculation, {speculation['note']}." in said) is (side == "on")
    drafted = int(await visit.number("on-drafted"))
    accepted = int(await visit.number("on-accepted"))
    assert (after[0] - before[0], after[1] - before[1]) == (drafted, accepted)
    assert accepted > 0
    assert await visit.number("on-rate") == f"{100 * accepted / drafted:.1f} %"
    label = await visit.page.get_attribute("#positions", "aria-label")
    assert label == f"Acceptance by position: {round(100 * accepted / drafted)} % of all drafts"


async def test_accepted_and_rejected_drafts_are_marked(visit: Visit) -> None:
    await visit.page.select_option("#sample", HARD_SAMPLE)
    await run_to_end(visit.page)
    reports = [chunk["speculation"] for chunk in await visit.chunks(1) if "speculation" in chunk]
    tokens = [token for report in reports for token in report["tokens"]]
    accepted = "".join(token["text"] for token in tokens if token["accepted"])
    marks = await visit.page.locator("#on-text mark.accepted").all_text_contents()
    assert "".join(marks) == accepted != ""
    assert await visit.page.locator("#off-text mark").count() == 0
    rejected = [
        "".join(draft["text"] for draft in report["rejected"])
        for report in reports
        if report["rejected"]
    ]
    shown = await visit.page.locator("#on-text .rejected").evaluate_all(
        "spans => spans.map(span => span.dataset.text)"
    )
    assert rejected
    assert len(shown) == len(rejected)
    for text, label in zip(rejected, shown, strict=True):
        assert label == text.replace("\n", "↵").strip() or (not text.strip() and TIMES in label)
    first = visit.page.locator("#on-text .rejected").first
    await visit.page.click("#show-rejected")
    await expect(first).to_be_hidden()


async def test_typed_text_runs_and_markup_in_it_stays_text(visit: Visit) -> None:
    title = await visit.page.title()
    prompt = f"<|code|>html = [\n    {HTML!r},\n]\nshow(html)\n<|rename|>html<|to|>lines<|out|>"
    await visit.page.fill("#prompt", prompt)
    assert await visit.page.input_value("#sample") == ""
    await visit.page.fill("#max-tokens", "100")
    await run_to_end(visit.page)
    answer = await visit.page.text_content("#on-text") or ""
    assert "<script>" in answer
    assert "<img" in answer
    assert await visit.page.locator("script").count() == 1
    assert await visit.page.locator("#on-text img, #off-text img").count() == 0
    assert await visit.page.title() == title


async def test_cancel_frees_the_requests(
    visit: Visit, stack: Stack, models: list[PausableModel]
) -> None:
    [model] = models
    model.pause_s = 0.2
    await visit.page.select_option("#order", "together")
    await visit.page.click("#run")
    await expect(visit.page.locator("#off-text")).not_to_be_empty()
    model.may_run.clear()
    model.pause_s = 0.0
    try:
        assert stack.metric("gateway", "tandem_num_requests_running") >= 1
        await visit.page.click("#cancel")
        await expect(visit.page.locator("#status")).to_have_text("Cancelled.")
    finally:
        model.may_run.set()
    await stack.check_idle()
    await wait_until(lambda: stack.metric("gateway", "tandem_num_requests_running") == 0)
    await run_to_end(visit.page)


async def test_the_keyboard_is_enough(visit: Visit) -> None:
    page = visit.page

    async def tab_to(*ids: str) -> None:
        for id_ in ids:
            await page.keyboard.press("Tab")
            assert await page.evaluate("document.activeElement.id") == id_

    await tab_to("sample")
    await page.keyboard.press("ArrowDown")
    assert await page.input_value("#sample") == RENAMES[1]["title"]
    await tab_to("prompt", "model", "max-tokens", "order", "run")
    await page.keyboard.press("Enter")
    await expect(page.locator("#status")).to_contain_text("times as fast")
    await wait_until_usable(page)
    await tab_to("replay")
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "cancel"
    await page.keyboard.press("Escape")
    await expect(page.locator("#status")).to_contain_text("times as fast")
    await wait_until_usable(page)
    assert await page.evaluate("document.activeElement.id") == "replay"
    await tab_to("show-rejected", "on-text", "off-text")


async def test_the_policy_holds(browser: Browser, stack: Stack) -> None:
    visit = await begin_visit(browser, stack.gateway.http_address)
    with pytest.raises(BrowserError, match="TrustedHTML"):
        await visit.page.evaluate("() => { document.body.innerHTML = '<b>bold</b>' }")
    with pytest.raises(BrowserError, match="Failed to fetch"):
        await visit.page.evaluate("() => fetch('http://192.0.2.1/')")
    assert any("Content Security Policy" in message for message in visit.messages)
    await visit.page.context.close()


async def test_an_error_is_one_line(browser: Browser, stack: Stack) -> None:
    visit = await begin_visit(browser, stack.gateway.http_address)
    error = visit.page.locator("#error")
    await visit.page.fill("#prompt", "word " * 2100)
    await visit.page.click("#run")
    await expect(error).to_contain_text("Error: ")
    assert "\n" not in await error.inner_text()
    assert "too long" in await error.inner_text()
    assert await visit.page.inner_text("#status") == ""
    await visit.page.context.set_offline(True)
    await visit.page.fill("#prompt", "word")
    await visit.page.fill("#max-tokens", "8")
    await wait_until_usable(visit.page)
    await visit.page.click("#run")
    await expect(error).to_have_text("Error: the gateway cannot be reached")
    await visit.page.context.set_offline(False)
    await wait_until_usable(visit.page)
    await run_to_end(visit.page)
    assert await error.inner_text() == ""
    await visit.page.context.close()


async def test_events_are_read_however_the_network_cuts_them(visit: Visit) -> None:
    events = ["first", "zwölf € 🦀", "[DONE]"]
    text = "".join(f"data: {event}\n\n" for event in events)
    for size in (1, 3, 7, len(text.encode())):
        read = await visit.page.evaluate(
            """async ([text, size]) => {
              const { readEvents } = await import("/page/completions.js");
              const bytes = new TextEncoder().encode(text);
              const body = new ReadableStream({
                start(controller) {
                  for (let i = 0; i < bytes.length; i += size) {
                    controller.enqueue(bytes.slice(i, i + size));
                  }
                  controller.close();
                },
              });
              const events = [];
              for await (const event of readEvents(body)) events.push(event);
              return events;
            }""",
            [text, size],
        )
        assert read == events


@pytest.mark.stand_in
@pytest.mark.parametrize(
    ("body", "line"),
    [
        ('data: {"error": {"message": "no verifier serves"}}\n\n', "Error: no verifier serves"),
        ('data: {"choices": [{"text": "half"}]}\n\n', "Error: the answer broke off"),
        ("", "Error: the answer broke off"),
    ],
)
async def test_an_answer_that_fails_midway_is_an_error(visit: Visit, body: str, line: str) -> None:
    async def answer(route: Route) -> None:
        await route.fulfill(content_type="text/event-stream", body=body)

    await visit.page.route("**/v1/completions", answer)
    await visit.page.click("#run")
    await expect(visit.page.locator("#error")).to_have_text(line)
    await wait_until_usable(visit.page)
    assert await visit.page.inner_text("#status") == ""


async def test_a_key_is_asked_for_and_kept_nowhere(
    browser: Browser, stack: Stack, tmp_path: Path
) -> None:
    clients = write_clients(tmp_path / "clients.yaml", a={"tokens": ["secret"]})
    async with another_gateway(stack, clients=clients) as gateway:
        visit = await begin_visit(browser, gateway.http_address)
        page, error = visit.page, visit.page.locator("#error")
        await expect(error).to_have_text("This gateway needs an API key.")
        assert await page.evaluate("document.activeElement.id") == "key"
        await page.fill("#key", "wrong")
        await page.click("#run")
        await wait_until_usable(page)
        await expect(error).to_have_text("This gateway refuses this API key.")
        await page.fill("#key", "secret\u200b")
        await page.click("#run")
        await wait_until_usable(page)
        await expect(error).to_contain_text("the API key has a character")
        await page.fill("#key", "secret")
        await page.select_option("#sample", HARD_SAMPLE)
        await run_to_end(page)
        assert await error.inner_text() == ""
        # This gateway allows no traces: how many were rejected is known, which is not.
        shown = await page.locator("#on-text .rejected").evaluate_all(
            "spans => spans.map(span => span.dataset.text)"
        )
        assert shown
        assert all(re.fullmatch(rf"{TIMES}\d+", label) for label in shown)
        assert await page.evaluate("localStorage.length + sessionStorage.length") == 0
        assert await page.context.cookies() == []
        assert all("401" in message for message in visit.messages)
        await page.reload()
        assert await page.input_value("#key") == ""
        await page.context.close()
