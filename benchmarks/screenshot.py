"""Take a picture of a report, or of a page of a running dashboard, with headless Chromium.

    python -m benchmarks.screenshot report.html docs/images/report-search.png --height 780
    python -m benchmarks.screenshot http://127.0.0.1:8642/workloads docs/images/dashboard-workloads.png --dark

Makes the pictures of reports and of the dashboard in the documentation; the gallery has the commands that
write the pages.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

READ_MS = 600_000
"""Longest wait until a dashboard has read its database, in milliseconds."""


def picture(source: str, out: Path, *, width: int, height: int, is_dark: bool, start: str) -> None:
    """Write a picture of the first screen of a page.

    Args:
        source: Path of an HTML file, or URL.
        out: PNG file to write.
        width: Width of the window, in pixels.
        height: Height of the window, in pixels.
        is_dark: Whether the reader prefers dark colours.
        start: CSS selector of the element at the top of the picture; empty for the top of the page.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        # Chromium refuses to run as root with its sandbox.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.emulate_media(color_scheme="dark" if is_dark else "light")
        page.goto(source if "://" in source else Path(source).resolve().as_uri())
        page.wait_for_load_state("load")
        page.locator("text=Reading the database").wait_for(state="hidden", timeout=READ_MS)
        if start:
            page.locator(start).first.evaluate("element => element.scrollIntoView()")
        page.screenshot(path=out)
        browser.close()


def main() -> None:
    """Take the picture that the command line describes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", help="HTML file or URL")
    parser.add_argument("out", type=Path, help="PNG file")
    parser.add_argument("--width", type=int, default=1120, help="pixels (default: 1120)")
    parser.add_argument("--height", type=int, default=780, help="pixels (default: 780)")
    parser.add_argument("--dark", action="store_true", help="dark colours")
    parser.add_argument("--start", default="", help="CSS selector of the element at the top")
    arguments = parser.parse_args()
    picture(
        arguments.page,
        arguments.out,
        width=arguments.width,
        height=arguments.height,
        is_dark=arguments.dark,
        start=arguments.start,
    )


if __name__ == "__main__":
    main()
