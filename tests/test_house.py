"""How the code is laid out: imports go one way, and what is long is long for a reason."""

import re

import pytest
from support import house

PAGE = house.ROOT / "docs" / "explanation" / "house.md"


def test_every_room_has_its_floor() -> None:
    rooms = {house.room(name) for name in house.files() if not name.endswith("/__init__")}
    assert rooms == set(house.ROOMS)


def test_no_file_imports_from_a_room_above_its_own() -> None:
    assert house.upward() == []


def test_packages_import_only_what_they_may() -> None:
    """Building an index and reading one, above all, know nothing of each other."""
    assert house.astray() == []


def test_no_files_import_each_other() -> None:
    assert set(house.file_order()) >= house.files().keys()


@pytest.mark.parametrize("found", [house.long_files, house.long_functions], ids=["files", "functions"])
def test_the_page_says_why_each_long_thing_is_one_thought(found: object) -> None:
    """Exactly those: a sentence about what is no longer long goes."""
    assert callable(found)
    title = "files" if found is house.long_files else "functions"
    section = PAGE.read_text(encoding="utf-8").split(f"## Long {title}", 1)[1].split("\n## ", 1)[0]
    explained = re.findall(r"^\| `([^`]+)` \| \S.{20,} \|$", section, re.MULTILINE)
    assert sorted(explained) == sorted(found())
