"""Links lead to files and headings that are there, and every page is found from the table of contents."""

import re
from pathlib import Path

import pytest
from support.doc_pages import PAGES, ROOT, name, without_blocks

CONTENTS = ROOT / "docs" / "README.md"
EXAMPLES = {"indexing/methods/norms.py", "runtime/methods/norms.py"}
"""Files that a reader is told to write."""


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures, without code."""
    text = re.sub(r"`[^`]*`", "", without_blocks(page))
    return [target.split(" ")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", without_blocks(page), flags=re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug + (f"-{number}" if number else "") for slug, last in found.items() for number in range(last + 1)}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost, f"{name(page)}: these links lead nowhere: {', '.join(lost)}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """Paths into the code, in backticks; capitals are for a reader to fill in."""
    named = re.findall(r"`((?:cli|indexing|runtime|kernels|formats|tests)/[^`*\s]*)`", without_blocks(page))
    lost = [path for path in named if not re.search(r"[A-Z]{2}", path) and not (ROOT / path).exists()]
    lost = [path for path in lost if not (ROOT / f"{path}.py").exists() and path not in EXAMPLES and ":" not in path]
    assert not lost, f"{name(page)} names {', '.join(lost)}, which are not there"


def test_the_table_of_contents_names_every_page() -> None:
    listed = {(CONTENTS.parent / link.split("#")[0]).resolve() for link in links(CONTENTS)}
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page != CONTENTS}
    missing = sorted(name(page) for page in pages - listed)
    assert not missing, f"docs/README.md has no link to {', '.join(missing)}"


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# `sparsekv bench`: a step\n\n## --guard\n## The *end*, perhaps\n## --guard\n\n```\n# no heading\n```\n"
    )
    assert anchors(page) == {"sparsekv-bench-a-step", "--guard", "the-end-perhaps", "--guard-1"}
