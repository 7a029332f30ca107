"""Layers that are built beside each other on a CPU: the same bytes as one after another, and what fails is told."""

import shutil
import signal
from contextlib import closing
from pathlib import Path
from threading import Event, Timer, get_ident

import pytest
import torch
from support.kernel_runs import with_threads
from support.small_index import small_plan, with_changes

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.indexing.build import build_index
from sparsekv.indexing.indexers.cluster_indexer import MOST_ITEMS, MOST_TOKENS, share_cores
from sparsekv.indexing.indexers.interface import LayerInput, indexers
from sparsekv.indexing.methods.squeezed import SqueezedIndexer


def test_any_number_of_threads_builds_the_same_from_one_context(tmp_path: Path) -> None:
    plan, sums = small_plan(), []
    build_index(plan, tmp_path / "one.skv")
    every = with_changes(plan, methods={name: kind() for name, kind in indexers().items()})
    for threads in (1, 3):
        folder = tmp_path / f"{threads}.skv"
        shutil.copytree(tmp_path / "one.skv", folder)
        with with_threads(threads):
            build_index(every, folder)
        sums.append({name: file.sha256 for name, file in Artifact(folder).manifest.files.items()})
    assert any(name.startswith("codes") for name in sums[0])
    assert sums[0] == sums[1]


@pytest.mark.parametrize(
    ("threads", "tokens", "each"),
    [(1, 9, 1), (2, 9, 1), (7, 9, 1), (16, 9, 16 // MOST_ITEMS), (6, MOST_TOKENS // 2, 3)],
)
def test_items_come_in_order_and_the_threads_are_given_back(threads: int, tokens: int, each: int) -> None:
    with with_threads(threads):
        counts = list(share_cores(range(20), tokens, lambda item: (item, torch.get_num_threads())))
        assert counts == [(item, each) for item in range(20)]
        assert list(share_cores([0], tokens, lambda _: torch.get_num_threads())) == [threads]
        assert list(share_cores([], tokens, lambda _: 0)) == []
        assert torch.get_num_threads() == threads


def test_layers_that_are_missing_have_the_threads_that_they_have_among_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more threads a layer's sums are rounded otherwise: a build that goes on would differ from a straight one."""
    plan, threads, folder = small_plan(), list[int](), tmp_path / "a.skv"
    build = SqueezedIndexer.build_layer

    def counted(indexer: SqueezedIndexer, layer: LayerInput) -> dict[str, torch.Tensor]:
        threads.append(torch.get_num_threads())
        return build(indexer, layer)

    monkeypatch.setattr(SqueezedIndexer, "build_layer", counted)
    with with_threads(6):
        manifest = build_index(plan, folder)
        (folder / manifest.files[layer_file("squeezed", 1)].path).unlink()
        build_index(plan, folder)
    assert threads == [2] * 4


def test_an_interruption_does_not_wait_for_what_has_begun() -> None:
    ends, main = Event(), get_ident()

    def work(item: int) -> bool:
        # The interruption comes once the work has begun. If it came earlier, it would end the tests.
        Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
        return ends.wait(60)

    with with_threads(1), closing(share_cores([0], 9, work)) as items, pytest.raises(KeyboardInterrupt):
        next(items)
    assert not ends.is_set()
    ends.set()


def test_what_fails_is_raised_and_what_has_not_begun_is_left() -> None:
    begun, failed = list[int](), Event()

    def work(item: int) -> int:
        begun.append(item)
        if item:
            assert failed.wait(60)
            return item
        failed.set()
        raise ValueError("the first")

    with with_threads(1), pytest.raises(ValueError, match="the first"):
        list(share_cores(range(20), 9, work))
    assert len(begun) < 4
