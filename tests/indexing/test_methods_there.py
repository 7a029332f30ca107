"""Methods of an index that a build does not name, and methods that are added to an index."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.small_index import INDEXERS, TEXT, small_plan, with_changes

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.indexing.append import adding_plan
from sparsekv.indexing.build import build_index
from sparsekv.indexing.indexers.interface import Indexer, LayerInput, Tensors, indexers
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.indexing.methods.csattention import CSAttentionIndexer


@pytest.mark.parametrize("first", ["codes", "csattention"])
def test_a_method_that_builds_from_another_sample_of_queries_is_built_beside_those_there(
    first: str, tmp_path: Path
) -> None:
    """Both are then built from the larger sample, or the one that was there is it already."""
    several: dict[str, Indexer] = {
        "codes": CodesIndexer(levels=(0.1,), code_bytes=4, iterations=2, query_sample=64),
        "csattention": CSAttentionIndexer(subspace_size=4, centroids=8, query_sample=128, iterations=2),
    }
    plan, folder = small_plan(methods={first: several.pop(first)}), tmp_path / "a.skv"
    build_index(plan, folder)
    (second,) = several
    told = list[str]()
    for _ in range(2):
        build_index(with_changes(plan, methods=several), folder, tell=told.append)
    anew = f"codes of {folder}: built again, from a larger sample of the document's queries"
    assert told == ([anew, "50 of 306 tokens to prefill, about 0 MB to write"] if first == "codes" else [])
    artifact = Artifact(folder)
    assert list(artifact.manifest.methods) == [first, second]  # `generate` asks the first
    sample = layer_file("samples", artifact.manifest.indexed_layers[0])
    of_one, build_together = artifact.tensors(sample), with_changes(plan, methods=plan.config.methods | several)
    build_index(build_together, tmp_path / "b.skv")
    assert torch.equal(of_one["positions"], Artifact(tmp_path / "b.skv").tensors(sample)["positions"])
    for name in (first, second):
        built_from = artifact.manifest.methods[name].built_from
        assert built_from[sample] == artifact.manifest.files[sample].sha256
    assert len(list(artifact.verify())) == len(artifact.manifest.files)


@dataclass(frozen=True)
class _Order(Indexer):
    """The method of a package that may be gone."""

    def build_layer(self, layer: LayerInput) -> Tensors:
        return {"token_order": layer.keys.float().norm(dim=-1).argsort(-1).int() + layer.split.sinks}


def test_a_method_that_is_not_installed_is_not_kept_for_another_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers' rows are the same to the last bit, and its tensors are of the tokens that were indexed before."""
    folder, plan = tmp_path / "a.skv", small_plan(methods={"multipole": INDEXERS["multipole"]}, chunk_size=1024)
    with monkeypatch.context() as installed:
        installed.setitem(indexers.known, "order", _Order)
        build_index(with_changes(plan, methods=plan.config.methods | {"order": _Order()}), folder)
    build_index(plan, folder)
    assert list(Artifact(folder).manifest.methods) == ["multipole", "order"]
    told = list[str]()
    build_index(with_changes(plan, tail=24), folder, tell=told.append)
    assert list(Artifact(folder).manifest.methods) == ["multipole"]
    assert "order is not kept, because the settings" in told[-1]


def test_methods_are_added_to_the_index_that_was_opened_alone(tmp_path: Path) -> None:
    """Another process may have built it from an edited text while the model was loaded: its text would be as before."""
    folder, plan = tmp_path / "a.skv", small_plan()
    build_index(plan, folder)
    late = adding_plan(Artifact(folder), plan.loaded, {"multipole": INDEXERS["multipole"]})
    edited = build_index(small_plan(text=TEXT[:200] + "edited" + TEXT[200:]), folder)
    with pytest.raises(ArtifactError, match=r"another process changed .*a\.skv while this command ran; run the same"):
        build_index(late, folder)
    assert Artifact(folder).manifest == edited
