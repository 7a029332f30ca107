"""Tests of a report on an index that learned from queries: recall on those queries, and the coverage of its lists."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.small_index import build_small

from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.reporting.recall import MeasuredQueries, seen_block, tail_block
from sparsekv.runtime.reporting.report import recall_report
from sparsekv.runtime.selection.interface import Budget

TABLES = CSAttentionIndexer(subspace_size=16, centroids=10_000, query_sample=10_000, alpha=0.25)
INDEXERS: dict[str, Indexer] = {"squeezed": SqueezedIndexer(), "csattention": TABLES}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """One subspace of whole heads, and a centroid for each query that was seen."""
    return build_small(tmp_path_factory.mktemp("seen") / "small.skv", methods=INDEXERS, tail=64)


def test_the_queries_that_were_seen_are_the_last_of_the_middle(index: OpenIndex) -> None:
    block = seen_block(index.artifact, 1)
    assert block is not None
    stored = index.artifact.tensors("samples/layer_001.safetensors")
    assert stored["positions"].tolist() == list(range(index.split.sinks, index.split.sinks + index.split.middle))
    assert torch.equal(block.queries, stored["queries"][:, -32:])
    assert block.visible.tolist() == [0] * 32


def test_recall_is_higher_on_queries_that_were_seen(tmp_path: Path) -> None:
    whole_lists = INDEXERS | {"csattention": replace(TABLES, alpha=1.0)}
    index = build_small(tmp_path / "whole.skv", methods=whole_lists, tail=64)
    report = recall_report(index.artifact, ["csattention", "squeezed"], [Budget(0.1)], MeasuredQueries(index.artifact))
    rows = {row.variant or row.method: row for row in report.by() if row.method == "csattention"}
    # A centroid for each of them, and one subspace: the lists are the ranking itself, but for what float16 rounds.
    assert rows["floor"].recall_seen is not None
    assert rows["floor"].recall_seen > 0.99
    assert rows["floor"].recall < rows["floor"].recall_seen - 0.05
    assert all(row.recall_seen is row.list_coverage is None for row in report.by() if row.method == "squeezed")


def test_fewer_queries_that_were_seen_do_not_stand_for_more_together(index: OpenIndex) -> None:
    """More queries together have a larger union of selections, and so a higher recall."""
    twice = {}
    for layer in index.artifact.manifest.indexed_layers:
        block = tail_block(index.artifact, layer)
        queries, visible = torch.cat([block.queries] * 2, 1), torch.cat([block.visible] * 2)
        twice[layer] = [replace(block, queries=queries, visible=visible)]
    asked = MeasuredQueries(index.artifact, twice)
    report = recall_report(index.artifact, ["csattention"], [Budget(0.1)], asked, together=(32, 33))
    known = {row.together: row.recall_seen is not None for row in report.by()}
    assert known == {32: True, 33: False}


def test_coverage_is_of_the_lists_that_are_read(index: OpenIndex) -> None:
    tail, tensors = tail_block(index.artifact, 2), index.artifact.method_tensors("csattention", 2)
    Hk, middle = len(tensors["centroids"]), index.split.middle
    queries = tail.queries.unflatten(0, (Hk, -1))[..., tensors["channels"].long()].double()
    named = torch.zeros(Hk, queries.shape[2], middle, dtype=torch.bool)
    for head, group, query, part in torch.cartesian_prod(*(torch.arange(size) for size in queries.shape[:4])):
        row, centroids = queries[head, group, query, part], tensors["centroids"][head, part].double()
        best = (centroids @ row / centroids.norm(dim=-1)).argmax()
        named[head, query, tensors["table_tokens"][head, part, best].long() - index.split.sinks] = True
    report = recall_report(index.artifact, ["csattention"], [Budget(1.0)], MeasuredQueries(index.artifact))
    rows = [row for row in report.by("layer", "kv_head") if row.layer == 2 and row.variant == "floor"]
    assert [row.list_coverage for row in rows] == pytest.approx(named.float().mean((1, 2)).tolist())
