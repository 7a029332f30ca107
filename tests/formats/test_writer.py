"""Tests of the files that a build reuses, the files that it writes again, and the files that it leaves behind."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from support.artifacts import (
    CONTEXT,
    METHOD,
    SPLIT,
    assert_holds,
    assert_no_strays,
    files_in,
    small_artifact,
    small_files,
    small_manifest,
    small_recipe,
)

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.growing_file import STAGING
from sparsekv.formats.index.manifest import JOURNAL, read_manifest
from sparsekv.formats.index.schema import MANIFEST, Manifest, TensorRecord
from sparsekv.formats.index.writer import ArtifactWriter

TENSORS = small_files()[CONTEXT]
RECIPE = small_recipe(CONTEXT, 0, 0)


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A folder whose build stopped after the context's file."""
    folder = tmp_path / "unfinished.skv"
    with ArtifactWriter(folder) as writer:
        writer.write(CONTEXT, TENSORS, RECIPE)
    return folder


class SlowNotes(ArtifactWriter):
    """Records chunks of a prefill only after the index is finished, or a fifth of a second later, as a slow disk does.

    With `finished`, an event that the test sets.
    """

    finished: Event

    def note(self, name: str, value: Any) -> None:
        self.finished.wait(0.2)
        super().note(name, value)


def test_a_chunk_that_is_recorded_late_leaves_no_journal_in_a_finished_index(tmp_path: Path) -> None:
    folder, writer = tmp_path / "index.skv", SlowNotes(tmp_path / "index.skv")
    writer.finished = Event()
    with writer:
        _prefill_and_finish(writer)
        writer.finished.set()
    assert_no_strays(folder)


class Killed(ArtifactWriter):
    """A build that ends after it wrote the manifest."""

    def _remove_strays(self, manifest: Manifest) -> None:
        raise KeyboardInterrupt


def _prefill_and_finish(writer: ArtifactWriter) -> None:
    writer.keep_prefill("0" * 64)
    writer.write_rows(CONTEXT, TENSORS, RECIPE, 8)
    writer.chunk_done(8, {"sample.0": torch.zeros(4, 2, 8)})
    writer.write_rows(CONTEXT, TENSORS, RECIPE, SPLIT.tokens)
    for name, tensors in small_files().items():
        writer.write(name, tensors, small_recipe(name, 0, 0))
    writer.finish(small_manifest())


def test_the_journal_of_a_finished_build_is_no_interrupted_one(tmp_path: Path) -> None:
    """Also if that build had resumed a build of more methods."""
    with ArtifactWriter(tmp_path) as writer:
        writer.write(METHOD, TENSORS, RECIPE)
        writer.write("more.safetensors", TENSORS, RECIPE)
    with pytest.raises(KeyboardInterrupt), Killed(tmp_path) as writer:
        _prefill_and_finish(writer)
    assert (tmp_path / JOURNAL).exists()
    assert_holds(tmp_path)
    with ArtifactWriter(tmp_path) as after:
        assert after.unfinished == 0
        assert after.kept_note is None
        after.clear_finished()
    assert_no_strays(tmp_path)


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def takes_over(folder: Path, recipe: str, *, force: bool = False) -> bool:
    with ArtifactWriter(folder, force=force) as writer:
        return writer.reuse(CONTEXT, recipe)


@pytest.mark.parametrize("earlier", ["index", "unfinished"])
def test_a_whole_file_of_the_same_recipe_is_taken_over(earlier: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(earlier)
    assert takes_over(folder, RECIPE)
    assert not takes_over(folder, small_recipe(CONTEXT, 1, 0))
    assert not takes_over(folder, RECIPE, force=True)


def test_what_is_whole_survives_builds_that_are_given_up_at_once(unfinished: Path) -> None:
    for _ in range(2):
        with ArtifactWriter(unfinished) as writer:
            writer.note("facts", 1)
    assert takes_over(unfinished, RECIPE)


@pytest.mark.parametrize("damage", [flip_last_byte, cut_last_byte, Path.unlink])
@pytest.mark.parametrize("earlier", ["index", "unfinished"])
def test_a_damaged_file_is_not_taken_over(
    earlier: str, damage: Callable[[Path], None], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(earlier)
    damage(folder / CONTEXT)
    assert not takes_over(folder, RECIPE)


def test_another_recipes_file_under_the_journalled_name_is_not_taken_over(unfinished: Path) -> None:
    journal = (unfinished / JOURNAL).read_bytes()
    with ArtifactWriter(unfinished) as writer:
        writer.write(CONTEXT, small_files(1)[CONTEXT], small_recipe(CONTEXT, 1, 0))
    (unfinished / JOURNAL).write_bytes(journal)
    assert not takes_over(unfinished, RECIPE)


def test_force_takes_over_what_it_has_written_itself(index: Path) -> None:
    with ArtifactWriter(index, force=True) as writer:
        writer.write(CONTEXT, TENSORS, RECIPE)
        assert writer.reuse(CONTEXT, RECIPE)
        assert not writer.reuse(METHOD, small_recipe(METHOD, 0, 0))


def test_a_build_reads_what_it_wrote_and_what_it_builds_upon(index: Path) -> None:
    changed = small_files(1)[CONTEXT]
    with ArtifactWriter(index) as writer:
        writer.write(CONTEXT, changed, small_recipe(CONTEXT, 1, 0))
        assert torch.equal(writer.read(CONTEXT)["keys"], changed["keys"])
        assert torch.equal(writer.read_base(CONTEXT)["keys"], TENSORS["keys"])


def test_only_what_changed_is_written(index: Path) -> None:
    before = (index / CONTEXT).stat()
    small_artifact(index, method=1)
    assert_holds(index, method=1)
    assert_no_strays(index)
    after = (index / CONTEXT).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_force_writes_everything(index: Path) -> None:
    before = (index / CONTEXT).stat().st_ino
    manifest = small_artifact(index, force=True)
    assert_holds(index)
    assert_no_strays(index)
    assert (index / manifest.files[CONTEXT].path).stat().st_ino != before


def test_force_replaces_a_damaged_manifest(index: Path) -> None:
    (index / MANIFEST).write_text("{}")
    with pytest.raises(ArtifactError, match="damaged"):
        small_artifact(index)
    small_artifact(index, force=True)
    assert_holds(index)
    assert_no_strays(index)


def test_the_sealed_manifest_is_the_one_on_disk_and_tells_shapes_and_dtypes(index: Path) -> None:
    manifest = small_artifact(index, method=1)
    assert manifest == read_manifest(index)
    for name, tensors in small_files(method=1).items():
        record = manifest.files[name]
        assert record.recipe == small_recipe(name, 0, 1)
        assert record.bytes == (index / record.path).stat().st_size
        assert record.tensors == {
            key: TensorRecord(shape=list(tensor.shape), dtype=str(tensor.dtype).split(".")[1])
            for key, tensor in tensors.items()
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool], ids=str)
def test_views_are_written_as_what_they_show(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(240).view(4, 6, 10).to(dtype)
    views = {"slice": whole[1:3, ::2], "transposed": whole.transpose(0, 2), "empty": whole[:0]}
    with ArtifactWriter(tmp_path / "some.skv") as writer:
        writer.write(METHOD, views, "recipe")
        stored = writer.read(METHOD)
        assert stored.keys() == views.keys()
        for name, view in views.items():
            assert stored[name].dtype == dtype
            assert torch.equal(stored[name], view)


def test_many_files_are_written_at_once_and_told_in_their_order(tmp_path: Path) -> None:
    folder, rows = tmp_path / "some.skv", torch.randn(60, 50_000)
    with ArtifactWriter(folder) as writer:
        for number, row in enumerate(rows):
            # Later files are smaller.
            writer.write(f"context/{number}.safetensors", {"keys": row[: 50_000 - 800 * number]}, "recipe")
        assert list(writer.files) == [f"context/{number}.safetensors" for number in range(60)]
    with ArtifactWriter(folder) as writer:
        for number, row in enumerate(rows):
            assert writer.reuse(f"context/{number}.safetensors", "recipe")
            keys = writer.read(f"context/{number}.safetensors")["keys"]
            assert torch.equal(keys, row[: 50_000 - 800 * number])


def test_a_name_that_is_written_twice_holds_the_second(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "some.skv") as writer:
        for seed in range(10):
            writer.write(CONTEXT, small_files(seed)[CONTEXT], small_recipe(CONTEXT, seed, 0))
        assert torch.equal(writer.read(CONTEXT)["keys"], small_files(9)[CONTEXT]["keys"])
        assert writer.reuse(CONTEXT, small_recipe(CONTEXT, 9, 0))


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_written_as_they_are(tmp_path: Path) -> None:
    large = torch.randn(3, STAGING // 4 + 7, device="cuda")
    tensors = {"large": large, "view": large[:, ::3], "one": large[0, :1].long(), "empty": large[:0].bfloat16()}
    with ArtifactWriter(tmp_path / "some.skv") as writer:
        for number in range(20):
            writer.write(f"context/{number}.safetensors", {key: t + number for key, t in tensors.items()}, "recipe")
        assert len(writer.files) == 20  # waits until all are on the disk
        for number, device in product(range(20), (torch.device("cpu"), large.device)):
            stored = writer.read(f"context/{number}.safetensors", device)
            assert all(one.device == device for one in stored.values())
            assert all(torch.equal(stored[key].cpu(), (tensor + number).cpu()) for key, tensor in tensors.items())


def test_strays_of_earlier_builds_are_removed(index: Path) -> None:
    with ArtifactWriter(index) as writer:
        for seed in (1, 2):
            writer.write(CONTEXT, small_files(seed)[CONTEXT], small_recipe(CONTEXT, seed, 0))
            assert writer.files
    (index / "context" / "layer_000.safetensors.01234567.tmp").write_bytes(b"half")
    (index / "manifest.json.89abcdef.tmp").write_bytes(b"half")
    small_artifact(index, method=1)
    assert_no_strays(index)


@pytest.mark.parametrize("force", [False, True])
def test_what_no_build_of_ours_named_is_never_touched(index: Path, force: bool) -> None:
    ours = files_in(index)
    others = {
        "notes.tmp",
        "model.safetensors",
        "context/layer_000.1234abcd.safetensors",
        "context/layer_000.safetensors.tmp",
        "context/mine.safetensors.01234567.tmp",
        "talk.skv/manifest.json",
        "talk.skv/context/layer_000.safetensors",
    }
    for name in others:
        (index / name).parent.mkdir(parents=True, exist_ok=True)
        (index / name).write_text("precious")
    (index / "empty").mkdir()
    small_artifact(index, context=1, method=1, force=force)
    small_artifact(index, context=0, method=1, force=force)
    assert_holds(index, context=0, method=1)
    assert others <= files_in(index)
    assert all((index / name).read_text() == "precious" for name in others)
    assert (index / "empty").is_dir()
    assert len(files_in(index) - others) == len(ours)


def test_a_build_that_changed_nothing_leaves_the_index_as_it_was(index: Path) -> None:
    manifest = (index / MANIFEST).read_bytes()
    (index / "context" / "layer_000.safetensors.01234567.tmp").write_bytes(b"half")
    with ArtifactWriter(index) as writer:
        assert all(writer.reuse(name, small_recipe(name, 0, 0)) for name in small_files())
        writer.leave_as_it_was()
    assert (index / MANIFEST).read_bytes() == manifest
    assert_holds(index)
    assert_no_strays(index)


def test_notes_come_back_until_the_index_is_finished(tmp_path: Path) -> None:
    folder, note = tmp_path / "some.skv", {"probe": [1, 2.5, None]}
    with ArtifactWriter(folder) as writer:
        writer.note("facts", note)
    with ArtifactWriter(folder) as writer:
        assert writer.notes == {"facts": note}
    small_artifact(folder)
    with ArtifactWriter(folder) as writer:
        assert writer.notes == {}


def test_force_forgets_notes(tmp_path: Path) -> None:
    folder = tmp_path / "some.skv"
    with ArtifactWriter(folder) as writer:
        writer.note("facts", 1)
    with ArtifactWriter(folder, force=True) as writer:
        assert writer.notes == {}


@pytest.mark.parametrize("data", [b"", b"[]", b'{"files": {}}', b'{"files": {"a": 1}, "notes": {}}', b"\xff"])
def test_an_unreadable_journal_costs_only_the_resumption(unfinished: Path, data: bytes) -> None:
    (unfinished / JOURNAL).write_bytes(data)
    assert not takes_over(unfinished, RECIPE)
    small_artifact(unfinished)
    assert_holds(unfinished)
    assert_no_strays(unfinished)


def test_a_build_that_was_given_up_keeps_its_files_out_of_the_way(index: Path) -> None:
    before = files_in(index)
    with ArtifactWriter(index) as writer:
        writer.write(CONTEXT, small_files(1)[CONTEXT], small_recipe(CONTEXT, 1, 0))
    assert_holds(index)
    assert len(files_in(index) - before) == 2  # the file and the journal
    small_artifact(index)
    assert files_in(index) == before
