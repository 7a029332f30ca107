"""A file of rows whose heads several processes write, of which one has begun it."""

import contextlib
import errno
import fcntl
import os
import threading
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
from sparsekv.formats.index.folder import Folder, JoinedFile, SharedFile
from sparsekv.formats.index.growing_file import HeadPart
from sparsekv.formats.index.reader import CPU, find_whole
from sparsekv.formats.index.schema import TOKENS
from sparsekv.formats.index.writer import ArtifactWriter, PartWriter

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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    """Leave a writer as a killed process leaves it: with its files, and without its lock."""
    writer._threads.shutdown()
    writer._lock.release()


@pytest.fixture
def outlived(tmp_path: Path, second: PartWriter) -> SharedFile:
    """Return the shared file of some.skv that `second` has joined, and whose first process was killed then."""
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


def test_a_file_that_is_ended_can_be_read_alone(writer: ArtifactWriter, second: PartWriter) -> None:
    """Nothing can write to it once it has its name."""
    shared = writer.share_rows(NAME, "recipe")
    assert second.join(writer.folder, {NAME: shared})
    second.put(NAME, _own(_rows(), SECOND), 60)
    assert _open(shared) == [os.O_WRONLY, os.O_RDWR]
    assert second.end(NAME, LONG)
    assert _open(shared) == [os.O_RDONLY, os.O_RDWR]


def _open(shared: SharedFile) -> list[int]:
    """How the descriptors of this process that are of a file are open, in the order of these numbers."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # other threads close theirs meanwhile
            one = os.stat(f"/proc/self/fd/{name}")
            if (one.st_dev, one.st_ino) == (shared.device, shared.inode):
                found.append(fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE)
    return sorted(found, key=[os.O_RDONLY, os.O_WRONLY, os.O_RDWR].index)


def test_what_all_have_written_is_read_before_it_has_its_sum(writer: ArtifactWriter, second: PartWriter) -> None:
    """And the sum may be another's; both keep reading once it has its name."""
    rows, told = _rows(), threading.Event()
    assert second.join(writer.folder, {NAME: writer.share_rows(NAME, "recipe")})
    second.put(NAME, _own(rows, SECOND), 60)
    assert second.end(NAME, LONG)
    writer.write_rows(NAME, _own(rows, FIRST), "recipe", 60, FIRST)
    writer.end_rows(NAME, "recipe", lambda: second.whole(NAME).sha256() if told.wait(LONG) else "late")
    for found in (writer.read(NAME), second.whole(NAME).read(CPU)):
        assert all(torch.equal(tensor, rows[name]) for name, tensor in found.items())
    assert not (writer.folder / NAME).exists()
    told.set()
    assert writer.record(NAME).sha256 == hash_bytes(save(rows)) == hash_file(writer.folder / NAME)
    for found in (writer.read(NAME), second.whole(NAME).read(CPU)):
        assert all(torch.equal(tensor, rows[name]) for name, tensor in found.items())


def test_a_sum_that_another_could_not_make_is_made_here(writer: ArtifactWriter) -> None:
    rows = _rows()
    writer.share_rows(NAME, "recipe")
    writer.write_rows(NAME, rows, "recipe", 60)
    writer.end_rows(NAME, "recipe", lambda: None)
    assert writer.record(NAME).sha256 == hash_bytes(save(rows))


def test_what_waits_for_sums_of_others_keeps_nothing_from_being_written(writer: ArtifactWriter) -> None:
    """However many there are, and files that are made from them wait, too."""
    free, rows, names = threading.Event(), _rows(), [f"context/layer_{number:03}.safetensors" for number in range(40)]
    for name in names:
        writer.share_rows(name, "recipe")
        writer.write_rows(name, rows, "recipe", 60)
        writer.end_rows(name, "recipe", lambda: None if free.wait(LONG) else "late")
    writer.write(TOKENS, {"input_ids": torch.arange(5)}, "recipe")
    assert writer.record(TOKENS).bytes
    assert not (writer.folder / names[0]).exists()
    for name in names:
        writer.write(name.replace("context", "made"), rows, "recipe", [name])
    free.set()
    made = {name: record.sha256 for name, record in writer.files.items() if name != TOKENS}
    assert set(made.values()) == {hash_bytes(save(rows))}


def test_a_file_that_is_whole_is_found_by_another_process(writer: ArtifactWriter) -> None:
    rows = _rows()
    writer.write(NAME, rows, "recipe")
    shared = writer.find(NAME)
    found = find_whole(Folder(writer.folder), shared).read(CPU)
    assert all(torch.equal(tensor, rows[name]) for name, tensor in found.items())
    with pytest.raises(FileNotFoundError):
        find_whole(Folder(writer.folder), replace(shared, inode=1))


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

    with ArtifactWriter(folder) as writer, pytest.raises(ArtifactError, match=r"some.skv: no space left on device; f"):
        prefill(writer)
    assert not list(folder.glob("context/*"))
