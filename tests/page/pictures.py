"""Draws the pictures of the page for the docs: light, dark, and on a phone.

    python -m tests.page.pictures docs/images

Runs the three services with the bundled model and a sample on the page, in a Chromium, which must
be installed. Other work on the machine spoils the times that the pictures show.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from playwright.async_api import Browser

from tests.integration.stack import running_stack, verifier_config
from tests.page.browser import CHROMIUM, open_page, run_to_end, running_chromium

_DESKTOP = {"viewport": {"width": 1100, "height": 900}}
_PICTURES: dict[str, dict[str, Any]] = {
    "page-light": {**_DESKTOP, "color_scheme": "light"},
    "page-dark": {**_DESKTOP, "color_scheme": "dark"},
    "page-phone": {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2},
}

# The first runs warm up the services and the browser.
_NUM_RUNS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the pictures of the page.")
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        parser.error("no Chromium is installed")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(draw_all(arguments.folder))


async def draw_all(folder: Path) -> None:
    """Writes a PNG file of each picture."""
    async with (
        running_stack(
            verifier=verifier_config(allow_trace=True), gateway={"allow_trace": True}
        ) as stack,
        running_chromium() as browser,
    ):
        for name, options in _PICTURES.items():
            await draw(browser, stack.gateway.http_address, folder / f"{name}.png", options)


async def draw(
    browser: Browser, http_address: str | None, path: Path, options: dict[str, Any]
) -> None:
    """Writes one picture: of the whole page, on a phone of what follows the form."""
    context = await browser.new_context(**options)
    page = await context.new_page()
    await open_page(page, http_address)
    for _ in range(_NUM_RUNS):
        print(f"{path.name}: {await run_to_end(page)}")
    is_phone = options["viewport"]["width"] < 500
    if is_phone:
        await page.evaluate("document.getElementById('run').scrollIntoView()")
    await page.screenshot(path=path, full_page=not is_phone)
    await context.close()


if __name__ == "__main__":
    main()
