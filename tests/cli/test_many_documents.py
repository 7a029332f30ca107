"""`build-index` of several documents: an index each, one model, and what fails costs no other document."""

import io
import os
import signal
import sys
from pathlib import Path

import pytest
from support.command import fails, run_here, start

from sparsekv.cli.building import recipe
from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.index.manifest import read_manifest
from sparsekv.formats.index.reader import Artifact

TAIL = ("--model", "model", "--method", "squeezed", "--tail", "32")
LETTERS = ("a", "b", "c")


@pytest.fixture
def documents(place: Path) -> Path:
    """`a.txt`, `b.txt` and `c.txt` beside the model."""
    for number, name in enumerate(LETTERS):
        (place / f"{name}.txt").write_text(f"Document {name} says {number}. " * 20)
    return place


def _hashes(folder: Path) -> dict[str, str]:
    return {str(path): hash_bytes(path.read_bytes()) for path in sorted(folder.rglob("*.safetensors"))}


def test_each_document_has_the_index_that_it_has_by_itself(documents: Path) -> None:
    built = run_here("build-index", "a.txt", "b.txt", *TAIL, "-o", "out", "-q")
    assert (built.code, built.stdout, built.stderr) == (0, "out/a.skv\nout/b.skv\n", "")
    assert run_here("build-index", "b.txt", *TAIL, "-q").stdout == "b.skv\n"
    together, alone = (read_manifest(documents / folder) for folder in ("out/b.skv", "b.skv"))
    assert {name: one.sha256 for name, one in together.files.items()} == {
        name: one.sha256 for name, one in alone.files.items()
    }
    for _ in Artifact(documents / "out" / "a.skv").verify():
        pass


def test_the_model_is_loaded_once(documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, real = [], recipe.load
    monkeypatch.setattr(recipe, "load", lambda *args, **how: (loads.append(args), real(*args, **how))[1])
    assert run_here("build-index", "a.txt", "b.txt", "c.txt", *TAIL, "-q").code == 0
    assert len(loads) == 1


def test_a_document_that_fails_is_told_at_the_end_and_the_others_are_built(documents: Path) -> None:
    (documents / "b.txt").write_bytes(b"text\0")
    built = run_here("build-index", "a.txt", "b.txt", "none.txt", "c.txt", *TAIL, "-q")
    assert (built.code, built.stdout) == (1, "a.skv\nc.skv\n")
    assert built.stderr.splitlines() == [
        "no such file: none.txt; the others are indexed",
        "b.txt is not text: it contains zero bytes; convert it to plain text first",
        "sparsekv: error: 2 of 4 documents were not indexed, for the reasons above; run the same command again to "
        "retry only these",
    ]
    assert not (documents / "b.skv").exists()


def test_a_missing_document_is_told_of_before_the_others_are_built(documents: Path) -> None:
    told = run_here("build-index", "a.txt", "none.txt", *TAIL).stderr
    assert told.index("no such file: none.txt; the others are indexed") < told.index("a.txt (1 of 1)")
    assert told.count("none.txt") == 1


def test_no_model_is_loaded_where_no_document_is_there(place: Path) -> None:
    told = run_here("build-index", "none.txt", "gone.txt", "--model", "no-such-model")
    assert (told.code, told.stdout) == (1, "")
    assert told.stderr.splitlines()[:2] == ["no such file: none.txt", "no such file: gone.txt"]
    assert "error: 2 of 2 documents were not indexed" in told.stderr


def test_what_is_whole_is_not_built_again(documents: Path) -> None:
    (documents / "b.txt").write_bytes(b"text\0")
    told = run_here("build-index", "a.txt", "b.txt", *TAIL, "-q")
    assert (told.code, "error: 1 of 2 documents was not indexed, for" in told.stderr) == (1, True)
    uuid, files = read_manifest(documents / "a.skv").uuid, _hashes(documents / "a.skv")
    (documents / "b.txt").write_text("Mended text of document b. " * 20)
    again = run_here("build-index", "a.txt", "b.txt", *TAIL)
    assert again.stdout == "a.skv\nb.skv\n"
    assert "a.skv is up to date: nothing to build\n" in again.stderr
    assert again.stderr.count("\nindexing ") == 1
    assert read_manifest(documents / "a.skv").uuid == uuid
    assert _hashes(documents / "a.skv") == files


def test_after_a_kill_the_same_command_builds_what_is_missing(documents: Path) -> None:
    command = ("build-index", "a.txt", "b.txt", "c.txt", *TAIL, "-q")
    running = start(*command, cwd=documents)
    while not (documents / "a.skv" / "manifest.json").exists() and running.stop():
        os.kill(running.pid, signal.SIGCONT)
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    uuid = read_manifest(documents / "a.skv").uuid
    assert run_here(*command).stdout == "a.skv\nb.skv\nc.skv\n"
    assert read_manifest(documents / "a.skv").uuid == uuid


@pytest.mark.parametrize("listed", ["list.txt", "-"])
def test_a_file_can_name_the_documents(documents: Path, listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "a.txt\n\n  b.txt  \na.txt\n"
    (documents / "list.txt").write_text(names)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(names.encode())))
    assert run_here("build-index", "--from-file", listed, *TAIL, "-q").stdout == "a.skv\nb.skv\n"
    for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32"):
        mark = "" if encoding == "utf-32" else "\ufeff"
        (documents / "marked.txt").write_bytes(f"{mark}{names}".encode(encoding))
        assert run_here("build-index", "--from-file", "marked.txt", *TAIL, "-q").stdout == "a.skv\nb.skv\n"


def test_a_list_of_one_document_puts_its_index_into_the_folder(documents: Path) -> None:
    (documents / "list.txt").write_text("a.txt\n")
    assert run_here("build-index", "--from-file", "list.txt", *TAIL, "-o", "out", "-q").stdout == "out/a.skv\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), ("no document to index: name a text file",)),
        (("--from-file", "empty.txt"), ("empty.txt has no names; put one per line there",)),
        (("--from-file", "none.txt"), ("no such file: --from-file none.txt",)),
        (("--from-file", "a.txt"), ("no line of a.txt names an existing file", "without --from-file")),
        (("a.txt", "b.skv"), ("no such file: b.skv", "-o b.skv")),
        (("a.txt", "sub/a.md"), ("a.txt and sub/a.md would both be indexed in out/a.skv", "--output NAME.skv")),
        (("a.txt", "-"), ("standard input has no name", "--output NAME.skv")),
        (("--from-file", "-", "-"), ("standard input has the list of documents",)),
        (("--from-file", "dash.txt"), ("dash.txt names standard input (-)", "build-index - --output NAME.skv")),
    ],
    ids=[
        "none",
        "empty list",
        "no list",
        "no document listed",
        "an index to build",
        "one name twice",
        "no name",
        "standard input twice",
        "standard input listed",
    ],
)
def test_a_list_that_cannot_be_built_is_refused_before_anything_is(
    documents: Path, arguments: tuple[str, ...], says: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a.txt\n")))
    (documents / "empty.txt").write_text(" \n")
    (documents / "dash.txt").write_text("-\n")
    fails(2, "build-index", *arguments, *TAIL, "-o", "out", says=says)
    assert not (documents / "out").exists()


def test_an_index_is_no_folder_of_indices_whatever_its_name(documents: Path) -> None:
    assert run_here("build-index", "a.txt", *TAIL, "-o", "indices").code == 0
    fails(2, "build-index", "a.txt", "b.txt", *TAIL, "-o", "indices", says=("it is an index, but each document",))


@pytest.mark.parametrize("output", ["doc.skv", "new.skv", "doc.txt", "new.txt", "out.md"])
def test_several_indices_go_into_a_folder_that_is_no_index(documents: Path, output: str) -> None:
    says = (f"--output {output}: ", "each document gets an index of its own")
    fails(2, "build-index", "a.txt", "b.txt", *TAIL, "-o", output, says=says)


def test_a_file_that_is_spelt_in_two_ways_is_one_document(documents: Path) -> None:
    Path("here").symlink_to(".")
    names = ("a.txt", "./a.txt", str(documents / "a.txt"), "here/a.txt", "here/../" + documents.name + "/a.txt")
    built = run_here("build-index", *names, *TAIL, "-q")
    assert (built.code, built.stdout, built.stderr) == (0, "a.skv\n", "")


def test_two_documents_of_one_index_are_refused_in_linked_folders_too(documents: Path) -> None:
    """The second would replace the first as an edited text of it."""
    Path("here").symlink_to(".")
    Path("a.md").write_text(Path("a.txt").read_text())
    fails(2, "build-index", "a.txt", "here/a.md", *TAIL, says=("a.txt and here/a.md would both be indexed in here/a",))


def test_blanks_around_a_listed_name_are_a_part_of_it_where_a_file_has_them(documents: Path) -> None:
    for name in (" a.txt", "b.txt "):
        Path(name).write_text(f"Another document {name!r}. " * 20)
    Path("list.txt").write_text(" a.txt\nb.txt \n  c.txt\t\r\n")
    built = run_here("build-index", "--from-file", "list.txt", *TAIL, "-o", "out", "-q")
    assert (built.code, built.stderr) == (0, "")
    assert built.stdout == "out/ a.skv\nout/b.txt .skv\nout/c.skv\n"
    tokens = [Artifact(documents / "out" / name).manifest.split.tokens for name in (" a.skv", "b.txt .skv", "c.skv")]
    assert min(tokens[:2]) > tokens[2]
