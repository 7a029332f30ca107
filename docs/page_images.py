"""Take the pictures in docs/images/ of the page of a trace, which is a file of what `trace --json` printed.

$CHROMIUM is the path of Chromium; playwright is installed by `make test-browser`.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright

from sparsekv.cli.pages.trace import write_trace_page

IMAGES = Path(__file__).parent / "images"
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 420, "height": 800}


def main() -> None:
    trace = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "trace.html"
        write_trace_page(trace, page)
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=sandbox)
        for name, size in (("wide", WIDE), ("narrow", NARROW)):
            for scheme in ("light", "dark"):
                _picture(browser, page, size, scheme, IMAGES / f"trace-{name}-{scheme}.png")
        browser.close()


def _picture(browser: Browser, page: Path, size: dict[str, int], scheme: str, path: Path) -> None:
    """Take a picture. A light picture shows the whole answer, a dark one what one head misses for one token."""
    shown = browser.new_page(viewport=size, color_scheme=scheme)
    shown.goto(page.absolute().as_uri())
    if scheme == "dark":
        shown.locator("#token-2").click()
        shown.locator("#answer").evaluate("answer => answer.blur()")
        shown.keyboard.press("c")
        shown.keyboard.press("N")
    shown.screenshot(path=path)
    shown.close()


if __name__ == "__main__":
    main()
