"""An open index stays as it was, and an index that is being replaced can be opened at any moment."""

import os
import resource
import threading
from pathlib import Path

import pytest
import torch
from support.artifacts import CONTEXT, assert_holds, small_artifact, small_files, small_manifest

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.reader import Artifact


def test_whoever_opens_while_writers_go_on_sees_one_index_whole(tmp_path: Path) -> None:
    folder, seeds = tmp_path / "some.skv", range(30)
    small_artifact(folder)
    opened, done = [], threading.Event()

    def write() -> None:
        for seed in seeds:
            small_artifact(folder, context=seed, method=seed, force=seed % 2 == 0)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        opened.append(Artifact(folder))
    writer.join()
    by_uuid = {small_manifest(seed, seed).uuid: seed for seed in seeds}
    for artifact in opened:
        seed = by_uuid[artifact.manifest.uuid]
        assert set(artifact.verify()) == set(small_files())
        assert torch.equal(artifact.context(0)[0], small_files(seed, seed)[CONTEXT]["keys"])
    assert len({artifact.manifest.uuid for artifact in opened}) > 1
    assert_holds(folder, context=seeds[-1], method=seeds[-1])


def test_an_open_index_reads_files_that_have_lost_their_names(index: Path) -> None:
    artifact = Artifact(index)
    small_artifact(index, context=1, method=1)
    assert not (index / CONTEXT).exists() or (index / CONTEXT).stat().st_nlink == 1
    assert torch.equal(artifact.context(0)[1], small_files()[CONTEXT]["values"])
    assert list(artifact.verify()) == list(small_files())


def test_a_closed_index_leaves_no_file_open(index: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    artifact = Artifact(index)
    assert len(os.listdir("/proc/self/fd")) > len(before) + 3
    del artifact
    assert set(os.listdir("/proc/self/fd")) == before


def test_more_files_than_a_process_may_open_at_first_are_opened(index: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
    try:
        assert list(Artifact(index).verify()) == list(small_files())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("name", ["manifest.json", CONTEXT])
def test_what_is_damaged_for_good_is_not_waited_for(index: Path, name: str) -> None:
    (index / name).write_bytes(b"{}")
    with pytest.raises(ArtifactError, match=r"damaged|truncated"):
        Artifact(index)
