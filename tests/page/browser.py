"""A headless Chromium, and what its user does on the page."""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator

from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# A busy machine may take long; nothing waits for time to pass.
PATIENCE_MS = 90_000

expect.set_options(timeout=PATIENCE_MS)


@contextlib.asynccontextmanager
async def running_chromium() -> AsyncIterator[Browser]:
    """Starts `CHROMIUM`, and stops it on exit."""
    # Containers have a small /dev/shm; root has no sandbox.
    flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=flags, timeout=PATIENCE_MS
        )
        try:
            yield browser
        finally:
            await browser.close()


async def open_page(page: Page, http_address: str | None) -> None:
    """Opens the page of a gateway, and waits until it can be used."""
    page.set_default_timeout(PATIENCE_MS)
    await page.goto(f"http://{http_address}/")
    await wait_until_usable(page)


async def wait_until_usable(page: Page) -> None:
    """Waits until nothing runs."""
    await expect(page.locator("#run:not([aria-disabled])")).to_be_visible()


async def run_to_end(page: Page) -> str:
    """Runs what the form says; returns what the page says of it."""
    await page.click("#run")
    await expect(page.locator("#status")).to_contain_text("times as fast")
    await wait_until_usable(page)
    return await page.inner_text("#status")
