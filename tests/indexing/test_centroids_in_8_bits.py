"""Clusters of an index in 8 bits: what a build, an append and a version before store of their centroids."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import sparse
from support.small_index import INDEXERS, reopen, small_plan

from sparsekv.formats.index.context_rows import KEYS, VALUES, with_restored_centroids
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Manifest
from sparsekv.indexing.append import encode_addition, growing_plan
from sparsekv.indexing.build import build_index
from sparsekv.indexing.capture.team import LayerWork
from sparsekv.indexing.plan import BuildPlan
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.interface import Budget

SCALED = ("level0.centroid_scales", "level0.value_centroid_scales")


class _Stopped(BaseException):
    """The exception that interrupts a build: no `except Exception` on the way may swallow it."""


def _plan(**changes: Any) -> BuildPlan:
    return small_plan(kv_dtype="int8", **changes)


def _sums(manifest: Manifest) -> dict[str, tuple[str, str]]:
    return {name: (file.sha256, file.recipe) for name, file in manifest.files.items()}


def _append(folder: Path, plan: BuildPlan, text: str) -> Manifest:
    artifact = Artifact(folder)
    addition = encode_addition(plan.loaded.tokenizer, text, artifact.manifest.prompt.chat)
    return build_index(growing_plan(artifact, plan.loaded, addition), folder)


@pytest.mark.parametrize("method", ["squeezed", "multipole", "codes"])
def test_they_are_the_means_of_what_is_stored_to_half_a_step(tmp_path: Path, method: str) -> None:
    build_index(_plan(methods={method: INDEXERS[method]}), tmp_path / "a.skv")
    artifact = Artifact(tmp_path / "a.skv")
    stored = artifact.method_tensors(method, 0)
    found = with_restored_centroids(stored, torch.float32)
    steps = {
        KEYS: stored[SCALED[0]].float()[..., None] * stored["level0.centroid_channel_scales"].float()[:, None],
        VALUES: stored[SCALED[1]].float()[..., None],
    }
    order, counts = stored["token_order"].long(), stored["level0.counts"].long()
    of_cluster = torch.stack([torch.repeat_interleave(torch.arange(len(one)), one) for one in counts])
    for name, rows in zip((KEYS, VALUES), artifact.context(0), strict=True):
        assert stored[name].dtype == torch.int8
        D = rows.shape[2]
        ordered = rows.double().gather(1, order[..., None].expand(-1, -1, D))
        sums = torch.zeros(*counts.shape, D, dtype=torch.float64)
        sums.scatter_add_(1, of_cluster[..., None].expand(-1, -1, D), ordered)
        filled = counts > 0
        means = sums / counts.clamp(min=1)[..., None]
        assert bool(((found[name] - means).abs() <= 0.51 * steps[name] + 1e-6)[filled].all())


def test_an_append_leaves_the_numbers_of_blocks_that_are_full(tmp_path: Path) -> None:
    """Restored and rounded again they would be other numbers, and further off."""
    folder, plan = tmp_path / "a.skv", _plan(tokens=300, methods={"multipole": INDEXERS["multipole"]})
    build_index(plan, folder)
    for text in ("Some more text, which follows.", "And more of it again."):
        before = {name: tensor.clone() for name, tensor in Artifact(folder).method_tensors("multipole", 1).items()}
        _append(folder, plan, text)
        after = Artifact(folder).method_tensors("multipole", 1)
        full = int(before["block_clusters"][0, -2])
        assert full > 0
        for name in (KEYS, VALUES, *SCALED):
            assert torch.equal(after[name][:, :full], before[name][:, :full])
        assert after[KEYS].shape[1] > full


def test_an_index_of_exact_centroids_still_opens_and_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions stored exact centroids beside keys and values in 8 bits."""
    folder, plan = tmp_path / "a.skv", _plan(methods={"multipole": INDEXERS["multipole"]})
    with monkeypatch.context() as patch:
        patch.setattr("sparsekv.indexing.build.CENTROID_FORM", "earlier")
        patch.setattr(LayerWork, "stored", lambda self, tensors, before=None: tensors)
        build_index(plan, folder)
    old = Artifact(folder).method_tensors("multipole", 0)
    assert old[KEYS].dtype == torch.float32
    cache = reopen(plan, folder).cache(sparse("multipole", Multipole(), Budget.parse("5%")))
    assert len(cache.layers) == len(Artifact(folder).manifest.layers)
    assert _append(folder, plan, "Some more text, which follows.").kv_storage is not None
    assert Artifact(folder).method_tensors("multipole", 0)[KEYS].dtype == torch.int8


def test_files_of_exact_centroids_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of an index that is whole, nor of a build that was stopped."""
    plan = _plan(methods={"multipole": INDEXERS["multipole"]})
    straight = build_index(plan, tmp_path / "straight.skv")

    def stop(stage: str, done: int, of: int) -> None:
        if stage == "index multipole" and done == 2:
            raise _Stopped

    for name, progress in (("whole.skv", lambda *_: None), ("stopped.skv", stop)):
        with monkeypatch.context() as patch, suppress(_Stopped):
            patch.setattr("sparsekv.indexing.build.CENTROID_FORM", "earlier")
            patch.setattr(LayerWork, "stored", lambda self, tensors, before=None: tensors)
            build_index(plan, tmp_path / name, progress)
        assert _sums(build_index(plan, tmp_path / name)) == _sums(straight)
