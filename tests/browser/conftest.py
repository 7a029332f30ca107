"""Every test here needs Chromium, and fails if its page asks for anything or its console says anything."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.browser import Watched, chromium, watched
from support.trace_document import synthetic_trace

from sparsekv.cli.pages.trace import write_trace_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Open = Callable[..., Watched]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="session")
def trace() -> dict[str, Any]:
    return synthetic_trace(3000, 20, 6, 3, 1)


@pytest.fixture
def opened(browser: "Browser", tmp_path: Path) -> Iterator[Open]:
    """Open the page of a trace's document; options are those of a browser's context."""
    pages: list[Watched] = []
    with ExitStack() as stack:

        def one(document: dict[str, Any], **options: Any) -> Watched:
            path = tmp_path / f"trace-{len(pages)}.html"
            write_trace_page(document, path)
            pages.append(stack.enter_context(watched(browser, path, **options)))
            return pages[-1]

        yield one
        assert [problem for page in pages for problem in page.problems()] == []
