"""Every method has a page, whose table of options is that of its dataclasses, and a row in the table of all."""

import re
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import ROOT, tables

from sparsekv.indexing.indexers.interface import indexers
from sparsekv.runtime.selection.interface import methods

FOLDER = ROOT / "docs" / "reference" / "methods"
BESIDE = {"README", "residual", "guard", "tuning", "placement"}
"""Pages of what works with several methods."""


def test_every_method_has_a_page_and_every_page_a_method() -> None:
    pages = {page.stem for page in FOLDER.glob("*.md")} - BESIDE
    assert pages == set(methods()), "docs/reference/methods/ has a page NAME.md for each method"


def test_the_table_of_all_methods_has_them_all() -> None:
    page = FOLDER / "README.md"
    rows = {row[0].split(" ")[0] for row in tables(page, "method", "reads, to choose")}
    assert set(methods()) <= rows
    assert f"has {len(methods())} methods" in page.read_text(encoding="utf-8")


def shown(field: Field[Any]) -> tuple[str, str]:
    """The option's cell and the default's, as a page writes them."""
    flag = field.name.replace("_", "-")
    if isinstance(field.default, bool):
        return f"`--{flag}` / `--no-{flag}`", "on" if field.default else "off"
    value = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
    return f"`--{flag}`", f"`{value}`"


@pytest.mark.parametrize("method", methods())
def test_a_page_has_the_options_of_its_method(method: str) -> None:
    registries = {"build": indexers(), "ask": methods()}
    expected = {
        (when, *shown(field))
        for when, registry in registries.items()
        if method in registry
        for field in fields(registry[method])
    }
    page: Path = FOLDER / f"{method}.md"
    written = {(when, option, default) for option, when, default, *_ in tables(page, "option", "when", "default")}
    assert written == expected, f"docs/reference/methods/{method}.md: the table `| option | when | default | ... |`"
    assert re.search(r"https://arxiv\.org/abs/", page.read_text(encoding="utf-8")) or method in UNPUBLISHED


UNPUBLISHED = {"csattention", "quoka", "window", "oracle"}
"""Pages without a link to a paper."""
