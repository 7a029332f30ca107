"""Methods of an index that a build does not name: those that build from one sample of queries are built beside it."""

from pathlib import Path

import pytest
import torch
from support.small_index import small_plan, with_changes

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.indexing.build import build_index
from sparsekv.indexing.indexers.interface import Indexer
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
