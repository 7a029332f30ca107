"""How the code is laid out: imports go one way."""

from support import house


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
