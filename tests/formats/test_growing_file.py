"""A file that is written while its rows come to be."""

import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save

from sparsekv.formats.checksums import hash_bytes, hash_file
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index import growing_file
from sparsekv.formats.index.folder import Folder, UnfinishedFile
from sparsekv.formats.index.growing_file import GrowingFile
from sparsekv.formats.index.writer import ArtifactWriter


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as some:
        yield some


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True), heads=st.integers(1, 3))
def test_the_bytes_are_those_of_a_file_written_at_once(
    tmp_path_factory: pytest.TempPathFactory, threads: ThreadPoolExecutor, ends: list[int], heads: int
) -> None:
    folder, stops = tmp_path_factory.mktemp("growing"), sorted(ends)
    whole = {name: torch.randn(heads, stops[-1], 4, dtype=torch.bfloat16) for name in ("values", "keys")}
    rows = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    file = GrowingFile(Folder(folder).begin("rows.safetensors"), rows)
    start = 0
    for end in stops:
        for name, tensor in whole.items():
            rows[name][:, start:end] = tensor[:, start:end]
        file.put(end, threads)
        start = end
    record = file.finish("rows.safetensors", "recipe")
    assert (folder / "rows.safetensors").read_bytes() == save(whole)
    assert record.bytes == len(save(whole))
    assert record.sha256 == hash_bytes(save(whole))
    assert [path.name for path in folder.iterdir()] == ["rows.safetensors"]


def test_rows_are_sent_to_the_disk_on_the_way(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_file, "FLUSHED", 100)
    rows = {"keys": torch.randn(2, 60, 4)}
    file = GrowingFile(Folder(tmp_path).begin("rows.safetensors"), rows)
    for end in range(10, 61, 10):
        file.put(end, threads)
    file.finish("rows.safetensors", "recipe")
    assert torch.equal(load_file(tmp_path / "rows.safetensors")["keys"], rows["keys"])


def test_a_file_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "some.skv"

    def fail_in_the_prefill() -> None:
        with ArtifactWriter(folder) as writer:
            writer.write_rows("context/layer_00.safetensors", {"keys": torch.randn(2, 60, 4)}, "recipe", 20)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail_in_the_prefill()
    assert not [path for path in folder.rglob("*") if "layer_00" in path.name]


def test_what_a_killed_build_left_goes_before_the_next_one_writes(tmp_path: Path) -> None:
    """It may be as large as the index, and the disk no larger."""
    rows, folder, name = {"keys": torch.randn(2, 60, 4)}, tmp_path / "some.skv", "context/layer_00.safetensors"
    killed = ArtifactWriter(folder).__enter__()
    killed.write_rows(name, rows, "recipe", 20)
    killed._threads.shutdown()
    killed._lock.release()
    assert list(folder.glob("context/*.tmp"))
    with ArtifactWriter(folder) as writer:
        assert not list(folder.glob("context/*.tmp"))
        writer.write(name, rows, "recipe")
        assert writer.record(name).sha256 == hash_file(folder / name)


def test_rows_that_came_early_end_as_the_file_of_their_name(tmp_path: Path) -> None:
    rows, name = {"keys": torch.randn(2, 60, 4), "values": torch.randn(2, 60, 4)}, "context/layer_00.safetensors"
    with ArtifactWriter(tmp_path / "some.skv") as writer:
        writer.write_rows(name, rows, "recipe", 20)
        writer.write_rows(name, rows, "recipe", 60)
        writer.write(name, rows, "recipe")
        assert all(torch.equal(tensor, rows[key]) for key, tensor in writer.read(name).items())
        assert writer.record(name).sha256 == hash_bytes(save(rows))
    assert (tmp_path / "some.skv" / name).read_bytes() == save(rows)


def test_a_disk_that_fills_stops_the_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next chunk says so, hours before the last one."""
    folder, rows = tmp_path / "some.skv", {"keys": torch.randn(2, 60, 4)}

    def full(file: UnfinishedFile, data: bytes | memoryview, place: int) -> None:
        if place:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def prefill() -> int:
        monkeypatch.setattr(UnfinishedFile, "write", full)
        with ArtifactWriter(folder) as writer:
            for end in range(1, 61):
                writer.write_rows("context/layer_00.safetensors", rows, "recipe", end)
                time.sleep(0.01)
        return end

    with pytest.raises(ArtifactError, match=r"no space left on device; free space"):
        prefill()
    assert not list(folder.glob("context/*"))


def test_an_end_that_is_interrupted_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rows = tmp_path / "some.skv", {"keys": torch.randn(2, 60, 4)}

    def interrupted(file: UnfinishedFile) -> None:
        raise KeyboardInterrupt

    def prefill() -> None:
        with ArtifactWriter(folder) as writer:
            writer.write_rows("context/layer_00.safetensors", rows, "recipe", 20)
            monkeypatch.setattr(UnfinishedFile, "discard", interrupted)
            raise RuntimeError("out of memory")

    with pytest.raises(KeyboardInterrupt):
        prefill()
    with ArtifactWriter(folder) as writer:
        writer.write("context/layer_00.safetensors", rows, "recipe")
