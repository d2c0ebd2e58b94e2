"""A visit of the page, and what it was answered."""

import dataclasses
import json
from typing import Any

from playwright.async_api import Browser, Page

from tests.page.browser import open_page

# Keeps the whole answers to requests for completions; the browser does not keep those of streams.
KEEP_ANSWERS = """
const original = window.fetch;
window.answers = [];
window.fetch = async (...request) => {
  const answer = await original(...request);
  if (answer.url.endsWith("/v1/completions")) {
    window.answers.push(answer.clone().text().catch(() => "cancelled"));
  }
  return answer;
};
"""


@dataclasses.dataclass
class Visit:
    """One visit to a page: what the browser reported meanwhile.

    Attributes:
        messages: errors and warnings on the console, violations of the policy included.
        hosts: that were asked.
    """

    page: Page
    messages: list[str]
    hosts: set[str]

    async def chunks(self, index: int) -> list[dict[str, Any]]:
        """The chunks of an answer: 0 is the one that is not timed, 1 that with speculation."""
        answers = await self.page.evaluate("Promise.all(window.answers)")
        data = [event.removeprefix("data: ") for event in answers[index].split("\n\n") if event]
        assert data[-1] == "[DONE]"
        return [json.loads(each) for each in data[:-1]]

    async def number(self, id_: str) -> str:
        return await self.page.inner_text(f"#{id_}")


async def begin_visit(browser: Browser, address: str | None, **options: Any) -> Visit:
    context = await browser.new_context(**options)
    await context.add_init_script(KEEP_ANSWERS)
    visit = Visit(page=await context.new_page(), messages=[], hosts=set())
    visit.page.on("console", lambda message: visit.messages.append(message.text))
    visit.page.on("pageerror", lambda error: visit.messages.append(str(error)))
    visit.page.on("request", lambda request: visit.hosts.add(request.url.split("/")[2]))
    await open_page(visit.page, address)
    return visit
