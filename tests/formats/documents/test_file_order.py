"""The order of a document's files, after edits, additions, removals and renamings."""

import pytest

from sparsekv.formats.documents.file_order import KnownFile, count_changes, in_order, told_changes
from sparsekv.formats.documents.files import SourceText, SourceTexts
from sparsekv.formats.index.schema import FileOrder, SourceFile

KNOWN = "d1 b1 a1 c1"
"""Files of the earlier version: a name, and the number of its text."""


def _sources(files: str) -> SourceTexts:
    return SourceTexts(tuple(SourceText(one[0], one[1], "text", 1) for one in sorted(files.split())))


def _known(files: str, **changes: int) -> list[KnownFile]:
    return [KnownFile(one[0], one[1], changes.get(one[0], 0)) for one in files.split()]


@pytest.mark.parametrize(
    ("now", "path", "stable", "changed_last"),
    [
        (KNOWN, "abcd", "dbac", "dbac"),
        ("d1 b2 a1 c1", "abcd", "dbac", "dacb"),
        ("d1 b1 a1 c1 _1", "_abcd", "dbac_", "dbac_"),
        ("d1 a1 c1", "acd", "dac", "dac"),
        ("d1 e1 a1 c1", "acde", "dace", "dace"),
        ("d2 b2 a1 c1 _1", "_abcd", "dbac_", "acdb_"),
        ("x1 y1", "xy", "xy", "xy"),
    ],
    ids=["same", "edited", "added", "removed", "renamed", "several", "all others"],
)
def test_orders(now: str, path: str, stable: str, changed_last: str) -> None:
    wanted: dict[FileOrder, str] = {"path": path, "stable": stable, "changed-last": changed_last}
    for order, names in wanted.items():
        assert "".join(file.path for file in in_order(_sources(now), order, _known(KNOWN)).files) == names
        first = in_order(_sources(now), order, [])
        assert first.files == _sources(now).files, "a document without an earlier version is ordered by path"


def test_what_changes_most_comes_last_behind_what_stays() -> None:
    known = _known("d1 b1 a1 c1", d=9, b=1, c=3)
    ordered = in_order(_sources("d1 b2 a2 c1"), "changed-last", known)
    assert [file.path for file in ordered.files] == ["d", "a", "b", "c"]


def test_changes_are_counted_from_the_second_version_on() -> None:
    files = _sources("a2 b1 e1").files
    assert count_changes(files, []) == {"a": 0, "b": 0, "e": 0}
    assert count_changes(files, _known("b1 a1 c1", a=2, b=1)) == {"a": 3, "b": 1, "e": 0}


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ("a1 b1 c1 d1", ""),
        ("a1 b2 c1 d1", "b changed"),
        ("a1 b2 c2 d2 e1", "b changed (also 2 files changed, 1 added)"),
        ("_9 a2 b1 c1", "_ added (also 1 file changed, 1 removed)"),
        ("a1 c1 d1", "b removed"),
        ("a1 b1 c1", "d removed"),
        ("a1 c1 d1 e2", "b renamed to e"),
        ("_4 a1 b1 c1", "d renamed to _"),
        ("a1 b1 c1 e4", "d renamed to e"),
        ("a1 c1 b1 d1", "c moved"),
        ("b1 c1 d1 a2", "a changed"),
    ],
)
def test_the_first_change_is_told(now: str, told: str) -> None:
    """The earlier document has four files, each with a text of its own."""
    texts = {"a1": 1, "b1": 2, "c1": 3, "d1": 4, "e2": 2, "_4": 4, "e4": 4}

    def table(files: str) -> list[SourceFile]:
        contents = [(one[0], texts.get(one, 100 + number)) for number, one in enumerate(files.split())]
        return [SourceFile(path=path, sha256=f"{content:064x}", start=0, stop=1) for path, content in contents]

    assert told_changes(table("a1 b1 c1 d1"), table(now), 0) == told


@pytest.mark.parametrize(
    ("same", "told"), [(9, "a changed (also 1 file changed)"), (10, "b changed (also 1 file changed)")]
)
def test_a_file_whose_text_stays_is_not_the_first_change(same: int, told: str) -> None:
    """The file's bytes change but its text stays, as with a blank line at its end."""

    def table(content: int) -> list[SourceFile]:
        places = {"a": (0, 10), "b": (15, 30)}
        sha256 = f"{content:064x}"
        return [SourceFile(path=path, sha256=sha256, start=start, stop=stop) for path, (start, stop) in places.items()]

    assert told_changes(table(1), table(2), same) == told
