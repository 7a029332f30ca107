"""Tests of the division of a build between two ranks: layers' indices and files' sums equal one process's."""

from pathlib import Path

import pytest
from support import rank_job
from support.two_ranks import FRESH, Both, run_both, without_methods

from sparsekv.cli.building.recipe import Target
from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.indexers.interface import indexers


def _sums(index: Path) -> dict[str, str]:
    return {name: file.sha256 for name, file in Artifact(index).manifest.files.items()}


def _layers(both: Both) -> int:
    return len(Artifact(both.folder / "llama-ranks.skv").manifest.layers)


@pytest.mark.slow
def test_each_rank_makes_its_share_of_layers_and_sums(fresh: Both) -> None:
    layers = _layers(fresh)
    assert [one.get("sums", 0) for one in fresh.deeds] == [layers - layers // 2, layers // 2]
    assert [one["layers"] for one in fresh.deeds] == [3 * (layers - layers // 2), 3 * (layers // 2)]
    assert layers // 2


def test_indices_are_those_that_one_process_makes_of_the_same_rows(fresh: Both, tmp_path: Path) -> None:
    """To the byte, and with the same calibration."""
    built = fresh.folder / "llama-ranks.skv"
    without_methods(built, tmp_path / "again.skv")
    recipe = rank_job.recipe(fresh.folder / "llama", FRESH)
    target = Target(str(fresh.folder / "doc.txt"), tmp_path / "again.skv")
    recipe.index(target, recipe.load, lambda stage, done, of: None)
    assert _sums(tmp_path / "again.skv") == _sums(built)
    assert Artifact(tmp_path / "again.skv").manifest.methods == Artifact(built).manifest.methods


@pytest.mark.slow
def test_ranks_make_what_a_finished_context_lacks_by_turns(tmp_path: Path) -> None:
    """Both ranks together write every method byte for byte as one process does. No rank runs the model or repeats a
    sum."""
    stored = [*indexers()]
    both = run_both(tmp_path, ["llama"], stored, resumed=True)
    assert _sums(tmp_path / "llama-ranks.skv") == _sums(tmp_path / "llama-alone.skv")
    layers = _layers(both)
    assert [one["layers"] for one in both.deeds] == [
        len(stored) * (layers - layers // 2),
        len(stored) * (layers // 2),
    ]
    assert not any("sums" in one or "rows" in one for one in both.deeds)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_what_the_other_rank_cannot_read_the_first_makes_alone(tmp_path: Path, kv_dtype: str) -> None:
    """As where it is on another machine, or the files are not written by all."""
    both = run_both(tmp_path, ["llama"], ["multipole"], kv_dtype, apart=kv_dtype == "auto")
    assert [one.get("layers", 0) for one in both.deeds] == [_layers(both), 0]
    assert both.deeds[1].get("rows", 0) == 0
