"""Where an index cannot be written: one line, and nothing of others touched."""

import os
from pathlib import Path

import pytest
from support.command import fails, run_here
from support.forked import zygote

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.writer import ArtifactWriter

BUILD = ("build-index", "doc.txt", "--model", "model")


def test_an_output_that_cannot_be_written(place: Path) -> None:
    """Permissions do not bind root, so: a folder of the kernel's, and a file where the folder should be."""
    fails(1, *BUILD, "-q", "-o", "/proc/none/x.skv", says=("cannot write /proc/none/x.skv", "--output"))
    fails(1, *BUILD, "-q", "-o", "doc.txt/x.skv", says=("cannot write doc.txt/x.skv", "--output"))


def test_a_read_only_output_folder(place: Path) -> None:
    """As a user whom permissions bind, which root is not."""
    locked = place / "locked"
    locked.mkdir(mode=0o555)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        with pytest.raises(ArtifactError, match=r"cannot write .*x\.skv: permission denied; .*--output"):
            ArtifactWriter(locked / "x.skv").__enter__()
    finally:
        os.seteuid(user)


def test_a_full_disk(place: Path) -> None:
    """A file-size limit fails a write as a full disk does, at a moment that no check beforehand could foresee."""
    done = zygote().run(*BUILD, "-q", "-o", "new.skv", folder=place, limits={"FSIZE": 100_000})
    assert done.code == 1, done
    assert len(done.stderr.splitlines()) == 1
    assert "cannot write new.skv: file too large; free space" in done.stderr
    assert not (place / "new.skv" / "manifest.json").exists()
    again = run_here(*BUILD, "-q", "-o", "new.skv")
    assert again.code == 0, again.stderr


def test_another_build_holds_the_folder(place: Path) -> None:
    with ArtifactWriter(Path("doc.skv")):
        fails(1, *BUILD, "-q", says=("doc.skv", "another process"))


def test_a_place_below_a_file_is_told(place: Path) -> None:
    fails(1, *BUILD, "-q", "-o", "doc.txt/new.skv", says=("doc.txt is a file, not a folder", "--output"))


def test_a_folder_with_other_things_is_left_alone(place: Path) -> None:
    fails(1, *BUILD, "-q", "-o", "model", says=("model is not an index and contains other files", "--output"))
    assert (place / "model" / "model.safetensors").exists()
