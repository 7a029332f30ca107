"""On a GPU: an index of a shorter text takes over what it has, and the queries that it lacks come from its rows."""

from pathlib import Path

import pytest
from support.reference import assert_close
from support.small_index import TEXT, prefilled, recorded_attention, small_plan

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import KVDtype, layer_file
from sparsekv.indexing.build import build_index
from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.indexing.plan import BuildPlan

pytestmark = pytest.mark.gpu
TABLES = CSAttentionIndexer(subspace_size=8, centroids=4, iterations=2, query_sample=100)


def _plan(text: str, kv_dtype: KVDtype | None) -> BuildPlan:
    plan = small_plan(text=text, tokens=len(text), methods={"csattention": TABLES}, kv_dtype=kv_dtype)
    plan.loaded.model.cuda()
    return plan


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(None, 1e-4), ("int8", 5e-2)], ids=["exact", "int8"])
def test_a_shorter_text_has_the_queries_of_a_whole_build(
    kv_dtype: KVDtype | None, tolerance: float, tmp_path: Path
) -> None:
    build_index(_plan(TEXT[:1000], kv_dtype), tmp_path / "a.skv")
    shorter = _plan(TEXT[:700], kv_dtype)
    with recorded_attention(shorter.loaded.model) as outputs:
        build_index(shorter, tmp_path / "a.skv")
    assert prefilled(outputs) < 300
    build_index(shorter, tmp_path / "b.skv")
    for layer in range(3):
        actual, expected = (Artifact(tmp_path / f"{name}.skv").tensors(layer_file("samples", layer)) for name in "ab")
        assert actual["positions"].tolist() == expected["positions"].tolist()
        assert_close(actual["queries"], expected["queries"], tolerance)
