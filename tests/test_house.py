"""How the code is laid out: imports go one way."""

import ast

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


def test_no_docstring_is_the_word_none() -> None:
    """A tool that fills in a missing docstring with the value None leaves this word."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    said = {
        name: [ast.get_docstring(node) for node in ast.walk(house.tree(name)) if isinstance(node, kinds)]
        for name in house.files()
    }
    assert [name for name, docstrings in said.items() if "None" in docstrings] == []


def test_triton_is_loaded_by_kernels_alone() -> None:
    """It takes long to import, and exists on Linux only: a definition's file names its kernel, and imports none."""
    loading = set()
    for name in house.files():
        for node in house.tree(name).body:
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            if any("triton" in each for each in {module, *names}) and not name.endswith("_triton"):
                loading.add(name)
    assert loading == set()
