"""A page of 128K tokens of a large model: what it weighs, how soon it is there, how smoothly it scrolls."""

from pathlib import Path
from typing import TYPE_CHECKING

from support.browser import watched
from support.trace_document import synthetic_trace

from sparsekv.cli.pages.trace import write_trace_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SCROLL = """async () => {
  const pane = document.getElementById("document");
  const [frames, slow] = [[], []];
  const observer = new PerformanceObserver((list) => slow.push(...list.getEntries().map((entry) => entry.duration)));
  observer.observe({ type: "long-animation-frame" });
  pane.scrollTop = 0;
  let last = await new Promise(requestAnimationFrame);
  for (let step = 0; step < 200; step += 1) {
    pane.scrollTop += 120;
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
  }
  await new Promise((done) => setTimeout(done, 200));
  return { longest: Math.max(...frames.slice(1)), slow: Math.max(0, ...slow) };
}"""
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"
RUNS = 5
SLOW = 50
"""Milliseconds from which on Chromium calls a frame long, of its work without waiting for other processes."""


def test_a_page_of_128k_tokens(browser: "Browser", tmp_path: Path) -> None:
    """The machine may be busy: the best of some runs counts, in which nothing else took the time."""
    path = tmp_path / "large.html"
    size = write_trace_page(synthetic_trace(131_072, 100, 36, 8, 0), path)
    ready, longest, slow, relit = [], [], [], []
    for _ in range(RUNS):
        with watched(browser, path) as one:
            ready.append(one.page.evaluate(DRAWN))
            scrolled = one.page.evaluate(SCROLL)
            longest.append(scrolled["longest"])
            slow.append(scrolled["slow"])
            one.page.locator("#token-3").click()
            began = one.page.evaluate("performance.now()")
            one.page.keyboard.press("ArrowRight")
            relit.append(one.page.evaluate(DRAWN) - began)
            assert one.problems() == []
    best, worst = ([f"{of(times):.0f}" for times in (ready, longest, relit)] for of in (min, max))
    print(
        f"\n128K tokens, 36 layers, 8 KV heads, 100 answer tokens: {size / 1e6:.1f} MB; drawn after {best[0]} ms, "
        f"longest frame while scrolling {best[1]} ms, another token lit after {best[2]} ms "
        f"(the best of {RUNS}; the worst {', '.join(worst)})"
    )
    assert size < 15_000_000
    assert min(ready) < 2000
    assert min(slow) < SLOW, "scrolling has frames of more work than that"
