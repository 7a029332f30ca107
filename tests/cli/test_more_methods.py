"""`build-index` of an index: methods added from its own tokens, also where text was appended that no file has."""

from pathlib import Path

import pytest
from support.command import fails, run_here

from sparsekv.formats.index.manifest import read_manifest
from sparsekv.formats.index.schema import Manifest

BUILD = ("build-index", "doc.txt", "--model", "model", "-q")


def _same_but_methods(before: Manifest, after: Manifest) -> None:
    for field in ("prompt", "split", "dtype", "prefill", "model", "kv_storage", "additions", "rope"):
        assert getattr(before, field) == getattr(after, field), field
    assert {name: one for name, one in after.files.items() if name in before.files} == before.files


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("--raw", "--sinks", "4", "--tail", "64", "--max-tokens", "600"),
    ],
    ids=str,
)
def test_an_index_takes_the_methods_that_its_document_would_give_it(place: Path, options: tuple[str, ...]) -> None:
    assert run_here(*BUILD, *options, "-o", "some.skv", "--method", "multipole").code == 0
    before = read_manifest(Path("some.skv"))
    added = run_here("build-index", "some.skv", "--method", "codes", "--method", "csattention", "-q")
    assert (added.code, added.stdout, added.stderr) == (0, "some.skv\n", "")
    after = read_manifest(Path("some.skv"))
    _same_but_methods(before, after)
    assert run_here(*BUILD, *options, "-o", "other.skv", "--method", "multipole").code == 0
    assert run_here(*BUILD, *options, "-o", "other.skv", "--method", "codes", "--method", "csattention").code == 0
    other = read_manifest(Path("other.skv"))
    assert {path: one.sha256 for path, one in after.files.items()} == {
        path: one.sha256 for path, one in other.files.items()
    }


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_an_index_with_appended_text_takes_methods_as_its_errors_say(place: Path, kv_dtype: str) -> None:
    assert run_here(*BUILD, "-o", "grown.skv", "--method", "multipole", "--kv-dtype", kv_dtype).code == 0
    Path("more.txt").write_text("One more line.\n")
    assert run_here("append", "-i", "grown.skv", "more.txt", "-q").code == 0
    before = read_manifest(Path("grown.skv"))
    lacks = run_here("recall-report", "-i", "grown.skv", "--method", "squeezed").error()
    refused = run_here(*BUILD, "-o", "grown.skv", "--method", "squeezed").error()
    assert "appended tokens, which this document does not have" in refused
    shown = ("build-index", "grown.skv", "--method", "squeezed")
    assert f"add it with `sparsekv {' '.join(shown)}`" in lacks
    assert f"add methods to it with `sparsekv {' '.join(shown)}`" in refused
    done = run_here(*shown, "-q")
    assert done.code == 0, done.stderr
    after = read_manifest(Path("grown.skv"))
    _same_but_methods(before, after)
    assert {*after.methods} == {"multipole", "squeezed"}
    assert run_here("generate", "-i", "grown.skv", "Why?", "--method", "squeezed", "--max-new-tokens", "2").code == 0


def test_what_is_there_is_not_built_again(place: Path) -> None:
    uuid = read_manifest(Path("doc.skv")).uuid
    again = run_here("build-index", "doc.skv/", "--method", "multipole")
    assert (again.code, again.stdout) == (0, "doc.skv\n")
    assert "doc.skv is up to date: nothing to build" in again.stderr
    assert read_manifest(Path("doc.skv")).uuid == uuid


def test_other_versions_of_what_reads_a_tokenizer_build_nothing_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsekv.formats.models.load.FORM", 0)
    before = read_manifest(Path("doc.skv"))
    again = run_here("build-index", "doc.skv", "--method", "multipole")
    assert "doc.skv is up to date: nothing to build" in again.stderr
    assert read_manifest(Path("doc.skv")) == before
    assert run_here("generate", "-i", "doc.skv", "What?", "--max-new-tokens", "1").code == 0


@pytest.mark.parametrize(
    "option",
    [
        ("--tail", "32"),
        ("--output", "other.skv"),
        ("--raw",),
        ("--force",),
        ("--max-tokens", "5"),
        ("--from-file", "list.txt"),
    ],
    ids=lambda option: option[0],
)
def test_what_the_index_has_decided_is_no_option(place: Path, option: tuple[str, ...]) -> None:
    (place / "list.txt").write_text("list.txt\n")
    fails(2, "build-index", "doc.skv", *option, says=(f"{option[0]}: doc.skv is an index", "leave the option out"))


def test_what_becomes_of_an_indexs_methods_is_told(place: Path) -> None:
    assert "added: codes" in run_here("build-index", "doc.skv", "--method", "codes").stderr
    assert "built anew: codes" in run_here("build-index", "doc.skv", "--method", "codes", "--levels", "0.1").stderr


def test_an_index_stands_alone(place: Path) -> None:
    fails(2, "build-index", "doc.txt", "doc.skv", says=("doc.skv is an index", "name it alone"))
    fails(2, "build-index", "doc.skv", "--dtype", "bfloat16", says=("--dtype bfloat16", "leave the option out"))
