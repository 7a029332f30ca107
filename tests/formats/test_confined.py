"""A build touches only its own files, in a folder that is an index, and never through a link."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.artifacts import CONTEXT, METHOD, assert_holds, files_in, small_artifact
from support.sealing import reseal

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.folder import LOCK, MARKER
from sparsekv.formats.index.manifest import JOURNAL
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import MANIFEST, TOKENS

OUTSIDE = [
    "../.bashrc",
    "../victim.safetensors",
    "/etc/victim.safetensors",
    "context/../../victim.safetensors",
    "context/./layer_000.safetensors",
    "a/b/c.safetensors",
    ".hidden.safetensors",
    "context\\layer.safetensors",
    "context/layer_000.safetensors\n",
    "manifest.json",
    "",
    "x" * 300 + ".safetensors",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leads_elsewhere_is_refused(index: Path, path: str) -> None:
    def point(fields: dict[str, Any]) -> None:
        fields["files"][CONTEXT]["path"] = path

    reseal(index, point)
    with pytest.raises(ArtifactError, match=r"field files\..*path is not valid"):
        Artifact(index)
    with pytest.raises(ArtifactError, match="is not valid"):
        small_artifact(index, context=1)


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_name_that_leads_elsewhere_is_refused(index: Path, path: str) -> None:
    reseal(index, lambda fields: fields["files"].update({path: fields["files"][CONTEXT]}))
    with pytest.raises(ArtifactError, match="is not valid"):
        Artifact(index)


def test_two_files_at_one_path_are_refused(index: Path) -> None:
    def share(fields: dict[str, Any]) -> None:
        fields["files"][METHOD] = fields["files"][METHOD] | {"path": CONTEXT}

    reseal(index, share)
    with pytest.raises(ArtifactError):
        Artifact(index)


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_journal_that_names_what_is_elsewhere_is_not_followed(tmp_path: Path, path: str) -> None:
    victim = tmp_path / "victim.safetensors"
    victim.write_text("precious")
    folder = tmp_path / "some.skv"
    small_artifact(folder)
    (folder / JOURNAL).write_text(json.dumps({"files": {}, "paths": [path], "notes": {}}))
    small_artifact(folder, context=1)
    assert victim.read_text() == "precious"
    assert_holds(folder, context=1)


def _victims(root: Path) -> dict[str, Path]:
    """A file and a folder outside the index, as targets of links."""
    (root / "victim").write_text("precious")
    (root / "victims").mkdir()
    for name in ("layer_000.safetensors", "layer_000.safetensors.01234567.tmp", "model.safetensors"):
        (root / "victims" / name).write_text("precious")
    return {"file": root / "victim", "folder": root / "victims"}


def _contents(root: Path) -> dict[str, str]:
    files = [root / "victim", *sorted((root / "victims").iterdir())]
    return {file.name: file.read_text() for file in files}


LINKED = [
    MANIFEST,
    JOURNAL,
    MARKER,
    LOCK,
    TOKENS,
    CONTEXT,
    "context",
    "squeezed",
    f"{MANIFEST}.tmp",
    f"{JOURNAL}.tmp",
    f"{CONTEXT}.tmp",
    "context/layer_000.01234567.safetensors",
]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", LINKED)
def test_nothing_is_read_or_written_through_a_link(tmp_path: Path, name: str, force: bool) -> None:
    victims = _victims(tmp_path)
    before = _contents(tmp_path)
    folder = tmp_path / "some.skv"
    small_artifact(folder)
    place = folder / name
    if place.is_dir():
        shutil.rmtree(place)
        place.symlink_to(victims["folder"])
    else:
        place.unlink(missing_ok=True)
        place.symlink_to(victims["file"])
    for build in (lambda: small_artifact(folder, context=1, method=1, force=force), lambda: Artifact(folder)):
        with contextlib.suppress(ArtifactError):
            build()
    assert _contents(tmp_path) == before
    assert victims["folder"].is_dir()


@pytest.mark.parametrize("name", [MANIFEST, TOKENS, CONTEXT, METHOD])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_plain_file_is_named_and_never_waited_for(
    index: Path, name: str, make: Callable[[Path], None]
) -> None:
    (index / name).unlink()
    make(index / name)
    with pytest.raises(ArtifactError, match="a link, a pipe or a folder lies where a plain file belongs"):
        Artifact(index)


def _saved_model(folder: Path) -> None:
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "manifest.json", "unfinished.jsonl"):
        (folder / name).write_text('{"architectures": ["LlamaForCausalLM"]}')


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["manifest.json", "unfinished.jsonl", "unfinished.json", ".sparsekv", "other.txt"])
def test_a_folder_of_another_program_is_refused_with_force_too(tmp_path: Path, name: str, force: bool) -> None:
    folder = tmp_path / "model"
    _saved_model(folder)
    (folder / name).write_text('{"files": "of another program"}')
    before = {path.name: path.read_text() for path in folder.iterdir()}
    with pytest.raises(ArtifactError, match=r"is not an index and contains other files.*--output"):
        small_artifact(folder, force=force)
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_another_programs_manifest_is_not_called_a_damaged_index_to_be_forced(tmp_path: Path) -> None:
    _saved_model(tmp_path / "model")
    with pytest.raises(ArtifactError) as error:
        Artifact(tmp_path / "model")
    assert "--force" not in str(error.value)


@pytest.mark.parametrize("force", [False, True])
def test_a_lost_manifest_is_no_dead_end(index: Path, force: bool) -> None:
    (index / MANIFEST).unlink()
    with pytest.raises(ArtifactError, match=r"unfinished.*again to resume"):
        Artifact(index)
    small_artifact(index, force=force)
    assert_holds(index)


def test_an_index_of_an_earlier_version_has_no_mark_and_gets_one(index: Path) -> None:
    (index / MARKER).unlink()
    assert_holds(index)
    small_artifact(index, method=1)
    assert_holds(index, method=1)
    assert (index / MARKER).exists()


def test_a_mark_that_another_program_left_is_none(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("something else")
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(ArtifactError, match="contains other files"):
        small_artifact(tmp_path, force=True)
    assert files_in(tmp_path) == {"notes.txt"}
