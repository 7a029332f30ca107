"""Chromium with an open page, and a record of the page's network requests and console messages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE = {"width": 1440, "height": 900}


@dataclass
class Watched:
    """An open page, with its network requests and console messages so far."""

    page: "Page"
    url: str
    requests: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).text_content() or ""

    def lit(self) -> dict[int, str]:
        """Return the kind of highlighting of each highlighted passage, by the passage's number."""
        found = "spans => spans.map(one => [Number(one.dataset.passage), one.dataset.kind])"
        return dict(self.page.locator(".passage[data-kind]").evaluate_all(found))

    def problems(self) -> list[str]:
        return [f"asked for {url}" for url in self.requests if url != self.url] + self.said

    def hacked(self) -> bool:
        """Whether a script of a hostile text has run."""
        return bool(self.page.evaluate("'__hacked' in window || document.title === 'hacked'"))


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Start the system's Chromium: the program $CHROMIUM, or the first one on the path."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=sandbox)
        yield browser
        browser.close()


@contextmanager
def watched(browser: "Browser", path: Path, **options: Any) -> Iterator[Watched]:
    """Open a page from its file in a browser without a network, and record the page's requests and messages."""
    context = browser.new_context(**{"viewport": WIDE, "offline": True, **options})
    one = Watched(context.new_page(), path.as_uri())
    one.page.on("request", lambda request: one.requests.append(request.url))
    one.page.on("console", lambda message: one.said.append(f"{message.type}: {message.text}"))
    one.page.on("pageerror", lambda error: one.said.append(f"error: {error}"))
    one.page.set_default_timeout(10_000)
    one.page.goto(one.url)
    yield one
    context.close()
