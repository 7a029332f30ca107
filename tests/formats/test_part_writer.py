"""A file of rows whose heads several processes write, of which one has begun it."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save

from sparsekv.formats.checksums import hash_bytes, hash_file
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.growing_file import HeadPart
from sparsekv.formats.part_writer import PartWriter
from sparsekv.formats.unfinished_file import JoinedFile, SharedFile
from sparsekv.formats.writer import ArtifactWriter

NAME = "context/layer_000.safetensors"
FIRST, SECOND = HeadPart(0, 2), HeadPart(1, 2)
LONG = 60.0  # seconds: more than any of these writes takes


def _rows(heads: int = 4, tokens: int = 60) -> dict[str, torch.Tensor]:
    return {name: torch.randn(heads, tokens, 4) for name in ("keys", "values")}


def _own(rows: dict[str, torch.Tensor], part: HeadPart) -> dict[str, torch.Tensor]:
    return {name: tensor.chunk(part.parts)[part.number] for name, tensor in rows.items()}


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ArtifactWriter]:
    with ArtifactWriter(tmp_path / "some.skv") as writer:
        yield writer


@pytest.fixture
def second() -> Iterator[PartWriter]:
    with PartWriter(SECOND) as second:
        yield second


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ends=st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True),
    heads=st.integers(1, 2),
    parts=st.integers(2, 3),
)
def test_the_bytes_are_those_of_a_file_of_all_heads(
    tmp_path_factory: pytest.TempPathFactory, ends: list[int], heads: int, parts: int
) -> None:
    """Whoever is faster, and while later rows are not there."""
    folder, stops = tmp_path_factory.mktemp("parts") / "some.skv", sorted(ends)
    whole = {name: torch.randn(heads * parts, stops[-1], 4, dtype=torch.bfloat16) for name in ("values", "keys")}
    first, *others = (HeadPart(number, parts) for number in range(parts))
    with ArtifactWriter(folder) as writer:
        shared = {NAME: writer.share_rows(NAME, "recipe")}
        for part in others:
            with PartWriter(part) as other:
                assert other.join(folder, shared)
                for end in stops:
                    other.put(NAME, _own(whole, part), end)
                assert other.end(NAME, LONG)
        for end in stops:
            writer.write_rows(NAME, _own(whole, first), "recipe", end, first)
        writer.end_rows(NAME, "recipe")
        assert all(torch.equal(tensor, whole[name]) for name, tensor in writer.read(NAME).items())
        assert writer.record(NAME).sha256 == hash_bytes(save(whole))
    assert (folder / NAME).read_bytes() == save(whole)


@pytest.mark.gpu
def test_heads_on_a_gpu_are_written_as_they_come(writer: ArtifactWriter, second: PartWriter) -> None:
    whole = {name: tensor.cuda() for name, tensor in _rows(heads=4, tokens=100_000).items()}
    filled = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    assert second.join(writer.folder, {NAME: writer.share_rows(NAME, "recipe")})
    for end in range(10_000, 100_001, 10_000):
        for name, tensor in whole.items():
            filled[name][:, end - 10_000 : end] = tensor[:, end - 10_000 : end]
        second.put(NAME, _own(filled, SECOND), end)
        writer.write_rows(NAME, _own(filled, FIRST), "recipe", end, FIRST)
    assert second.end(NAME, LONG)
    writer.end_rows(NAME, "recipe")
    assert writer.record(NAME).sha256 == hash_bytes(save({name: tensor.cpu() for name, tensor in whole.items()}))


@pytest.mark.parametrize("change", [{"machine": "another"}, {"inode": 1}, {"device": 1}, {"path": f"{NAME}.tmp"}])
def test_a_file_that_is_not_the_one_begun_is_not_joined(
    writer: ArtifactWriter, second: PartWriter, change: dict[str, str | int]
) -> None:
    shared = writer.share_rows(NAME, "recipe")
    assert not second.join(writer.folder, {NAME: replace(shared, **change)})


def test_a_folder_that_is_not_there_is_not_joined_nor_made(
    writer: ArtifactWriter, second: PartWriter, tmp_path: Path
) -> None:
    assert not second.join(tmp_path / "another.skv", {NAME: writer.share_rows(NAME, "recipe")})
    assert not (tmp_path / "another.skv").exists()


def test_a_link_in_place_of_the_file_is_not_followed(
    writer: ArtifactWriter, second: PartWriter, tmp_path: Path
) -> None:
    shared = writer.share_rows(NAME, "recipe")
    (writer.folder / shared.path).rename(tmp_path / "elsewhere")
    (writer.folder / shared.path).symlink_to(tmp_path / "elsewhere")
    assert not second.join(writer.folder, {NAME: shared})


def test_where_another_cannot_join_one_process_writes_all(writer: ArtifactWriter) -> None:
    rows = _rows()
    writer.share_rows(NAME, "recipe")
    writer.unshare_rows()
    assert not list(writer.folder.glob("context/*"))
    writer.write(NAME, rows, "recipe")
    assert writer.record(NAME).sha256 == hash_bytes(save(rows))


def test_rows_of_files_that_were_not_joined_are_left_to_the_other(second: PartWriter) -> None:
    """The file of a resumed build may be whole."""
    second.put(NAME, _rows(), 60)
    assert second.end(NAME, LONG)


def _kill(writer: ArtifactWriter) -> None:
    """What a killed process leaves: its files, and no lock."""
    writer._threads.shutdown()
    writer._lock.release()


@pytest.fixture
def outlived(tmp_path: Path, second: PartWriter) -> SharedFile:
    """What `second` has joined in some.skv, whose first process was killed then."""
    killed = ArtifactWriter(tmp_path / "some.skv").__enter__()
    shared = killed.share_rows(NAME, "recipe")
    assert second.join(killed.folder, {NAME: shared})
    killed.write_rows(NAME, _own(_rows(), FIRST), "recipe", 20, FIRST)
    _kill(killed)
    return shared


def test_who_outlives_the_first_process_writes_to_no_file_of_the_next_build(
    tmp_path: Path, second: PartWriter, outlived: SharedFile
) -> None:
    """Neither before nor after that one's has its name."""
    folder, rows, stale = tmp_path / "some.skv", _rows(), _own(_rows(), SECOND)
    with ArtifactWriter(folder) as writer:
        assert not (folder / outlived.path).exists()
        shared = {NAME: writer.share_rows(NAME, "recipe")}
        second.put(NAME, stale, 30)
        with PartWriter(SECOND) as other:
            assert other.join(folder, shared)
            other.put(NAME, _own(rows, SECOND), 60)
            assert other.end(NAME, LONG)
        writer.write_rows(NAME, _own(rows, FIRST), "recipe", 60, FIRST)
        writer.end_rows(NAME, "recipe")
        assert writer.record(NAME).sha256 == hash_bytes(save(rows))
    second.put(NAME, stale, 60)
    assert second.end(NAME, LONG)
    assert hash_file(folder / NAME) == hash_bytes(save(rows))
    assert [path.name for path in folder.glob("context/*")] == [Path(NAME).name]


def test_who_outlives_the_first_process_does_not_find_the_file_of_the_next_build(
    tmp_path: Path, outlived: SharedFile
) -> None:
    with ArtifactWriter(tmp_path / "some.skv") as writer, PartWriter(SECOND) as late:
        writer.share_rows(NAME, "recipe")
        assert not late.join(writer.folder, {NAME: outlived})


def test_a_file_that_is_ended_is_closed(writer: ArtifactWriter, second: PartWriter) -> None:
    """Nothing can write to it once it has its name."""
    shared = writer.share_rows(NAME, "recipe")
    assert second.join(writer.folder, {NAME: shared})
    second.put(NAME, _own(_rows(), SECOND), 60)
    assert _open(shared) == 2
    assert second.end(NAME, LONG)
    assert _open(shared) == 1


def _open(shared: SharedFile) -> int:
    """How many descriptors of this process are of a file."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # other threads close theirs meanwhile
            one = os.stat(f"/proc/self/fd/{name}")
            found += (one.st_dev, one.st_ino) == (shared.device, shared.inode)
    return found


def test_a_slow_disk_is_told_from_a_file_that_is_written(
    writer: ArtifactWriter, second: PartWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, free = _own(_rows(), SECOND), False

    def slow(file: JoinedFile, data: bytes | memoryview, place: int) -> None:
        while not free:
            time.sleep(0.01)

    monkeypatch.setattr(JoinedFile, "write", slow)
    assert second.join(writer.folder, {NAME: writer.share_rows(NAME, "recipe")})
    second.put(NAME, rows, 60)
    assert not second.end(NAME, 0.05)
    free = True
    assert second.end(NAME, LONG)


@pytest.mark.parametrize("then", ["goes on", "ends"])
def test_a_disk_that_fills_is_told_as_to_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    folder, rows = tmp_path / "some.skv", _own(_rows(), SECOND)

    def full(file: JoinedFile, data: bytes | memoryview, place: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(JoinedFile, "write", full)

    def prefill(writer: ArtifactWriter) -> None:
        with PartWriter(SECOND) as second:
            assert second.join(folder, {NAME: writer.share_rows(NAME, "recipe")})
            for end in range(1, 61 if then == "goes on" else 2):
                second.put(NAME, rows, end)
                time.sleep(0.01)
            assert then == "ends"
            second.end(NAME, LONG)

    with ArtifactWriter(folder) as writer, pytest.raises(ArtifactError, match=r"some.skv: no space left on device; m"):
        prefill(writer)
    assert not list(folder.glob("context/*"))
