"""Tests of an index's default name, and of the texts that an index may have its name from."""

from pathlib import Path

import pytest

from sparsekv.formats.errors import beside, with_ending


@pytest.mark.parametrize(
    ("document", "index"),
    [
        ("manual.txt", "manual.skv"),
        ("sub/notes.md", "sub/notes.skv"),
        ("solver.f90", "solver.skv"),
        ("page.v2.html", "page.v2.skv"),
        ("LICENSE", "LICENSE.skv"),
        ("Apache-2.0", "Apache-2.0.skv"),
        ("paper.v2", "paper.v2.skv"),
        ("log.2024-05", "log.2024-05.skv"),
        ("Chapter 1. The beginning", "Chapter 1. The beginning.skv"),
        (".profile", ".profile.skv"),
    ],
)
def test_only_an_extension_gives_way_to_the_ending(document: str, index: str) -> None:
    assert with_ending(Path(document)) == Path(index)


@pytest.mark.parametrize("document", ["manual.txt", "Apache-2.0", "a[b].md"])
def test_a_text_is_found_beside_the_index_that_has_its_name(tmp_path: Path, document: str) -> None:
    (tmp_path / document).write_text("text")
    folder = with_ending(tmp_path / document)
    folder.mkdir()
    assert [path for path in beside(folder) if path.exists()] == [tmp_path / document]
