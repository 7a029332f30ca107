"""A deed of documents of several files: after edits, in each order, the index equals that of a build of the same
text."""

import shutil
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from random import Random

from support.command import run_here

from sparsekv.formats.index.manifest import read_manifest
from sparsekv.formats.index.schema import FILE_ORDERS, SourceFile
from sparsekv.indexing.prefill.prefills import prefills
from sparsekv.runtime.decoding.open import OpenIndex

from .building import same_as_fresh
from .commands import as_arguments, is_read_back, placed, ran, reading_options
from .deeds import deed
from .oracles import expect
from .world import World

NAMES = ("__init__.py", "a.md", "a/b.py", "a/c d.txt", "src/b.py", "z.txt", "Z.txt", "\u00e9.md")
FOLDER, INDEX = Path("project"), Path("project.skv")


@deed("folder", 5, asks=False)
def folder(world: World, index: OpenIndex) -> None:
    """Check that the index of a folder, built after each of some edits, equals a fresh build of its text."""
    if not is_read_back(world) or not world.case.indexers:  # the command always builds a method
        return
    case, random = world.case, Random(world.case.more)
    with placed(world):
        shutil.rmtree(FOLDER, ignore_errors=True)
        names = random.sample(NAMES, random.choice([1, 2, 3, 4]))
        letters = max(8, (case.tokens - 24 * len(names)) // len(names))
        for name in names:
            _write(world, name, world.some_text(letters, random.randint(0, 10**6)))
        table: Sequence[SourceFile] = ()
        for number in range(random.choice([1, 2, 3])):
            order = random.choice(FILE_ORDERS)
            if number:
                for _ in range(random.choice([1, 1, 2])):
                    _edit(world, random)
            code, forced = _built(world, order)
            if code:
                return
            table = _check(order, () if forced else table)
            text = "\n\n".join(f"# File: {file.path}\n\n{_text(world, file.path)}" for file in table)
            name = case.indexers[0][0]
            plan = world.plan(text, methods={name: world.plan().config.methods[name]})
            ids = read_manifest(INDEX).prompt.ids_sha256
            shutil.rmtree("fresh.skv", ignore_errors=True)
            same_as_fresh(world, world.folder / INDEX, plan, methods=True)
            expect(ids == read_manifest(Path("fresh.skv")).prompt.ids_sha256, "folder: tokens", f"{order}: {table}")


def _built(world: World, order: str) -> tuple[int, bool]:
    """Build or update the index by the command; return its exit code, and whether the index was replaced as a whole."""
    case = world.case
    name, options = case.indexers[0]
    build = ["build-index", str(FOLDER), "--order", order, "--model", "model", "-q", "--device", world.device]
    build += ["--sinks", str(case.sinks), "--tail", str(case.tail), "--chunk-size", str(case.chunk_size)]
    build += ["--method", name, *as_arguments(options), *("--raw",) * case.raw, "--prefill", case.prefill]
    build += reading_options(world)
    build += as_arguments(case.prefill_options_read) if case.prefill in prefills() else []
    build += [] if case.kv_dtype is None else ["--kv-dtype", case.kv_dtype]
    build += [] if case.rounded is None else ["--weights", case.rounded]
    if "is the index of another document" in run_here(*build).stderr:
        return ran(world, *build, "--force").code, True
    return ran(world, *build).code, False  # the index is already up to date, or the build is refused again


def _check(order: str, before: Sequence[SourceFile]) -> Sequence[SourceFile]:
    """Check that the manifest's table has all files, each with its text, in their order; return the table."""
    table = read_manifest(INDEX).prompt.files or ()
    names, there = [file.path for file in table], {str(one.relative_to(FOLDER)) for one in _files()}
    expect({*names} == there and len(names) == len(there), "folder: files", f"{names}, not {sorted(there)}")
    earlier = [file.path for file in before if file.path in there]
    if order == "path":
        expect(names == sorted(names, key=lambda name: name.split("/")), "folder: order", f"{names}")
    if order == "stable":
        expect(names[: len(earlier)] == earlier, "folder: stable order", f"{names} after {earlier}")
    if order == "changed-last":
        sums = {file.path: file.sha256 for file in table}
        same = takewhile(lambda file: sums.get(file.path) == file.sha256, before)
        kept = [file.path for file in same]
        expect(names[: len(kept)] == kept, "folder: changed last", f"{names} after {kept}")
    return table


def _files() -> list[Path]:
    return sorted(path for path in FOLDER.rglob("*") if path.is_file())


def _write(world: World, name: str, text: str) -> None:
    (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
    (FOLDER / name).write_bytes(text.encode(world.case.encoding))


def _read(world: World, name: str) -> str:
    return (FOLDER / name).read_bytes().decode(world.case.encoding)


def _text(world: World, name: str) -> str:
    return _read(world, name).strip("\n").rstrip()


def _edit(world: World, random: Random) -> None:
    """Edit, add, remove or rename a file, as editors do."""
    files, kind = _files(), random.choice(["edit", "edit", "add", "remove", "rename", "blank lines"])
    free, name = [name for name in NAMES if not (FOLDER / name).exists()], str(random.choice(files).relative_to(FOLDER))
    text, more = _read(world, name), world.some_text(random.choice([1, 9, 40]), random.randint(0, 10**6))
    if kind == "edit":
        place = random.choice([0, len(text) // 2, len(text)])
        _write(world, name, text[:place] + more + text[place + random.choice([0, 1, 20]) :])
    elif kind == "blank lines":
        _write(world, name, f"\n\n{text}  \n")
    elif kind == "add" and free:
        _write(world, random.choice(free), more)
    elif kind == "remove" and len(files) > 1:
        (FOLDER / name).unlink()
    elif kind == "rename" and free:
        _write(world, random.choice(free), text)
        (FOLDER / name).unlink()
