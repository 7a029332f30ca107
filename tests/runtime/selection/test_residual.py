"""Centroids in the place of what any method leaves out: by count, by definition, and where they come from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import member_means, token_labels
from support.command import run_here
from support.kernel_runs import poisoned_memory
from support.random_tensors import normal
from support.reference import assert_close
from support.replaced import Step, tokens_represented
from support.small_index import build_small
from support.small_layer import SmallLayer, as_queries, small_layer
from support.tiny_models import save_tiny

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.prepare import prepare_layer, residual_source
from sparsekv.runtime.methods.loki import Loki
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec, Selector
from sparsekv.runtime.selection.wrappers import ResidualSelector, residual_clusters

METHODS: dict[str, Method] = {
    "quest": Quest(page_size=7),
    "oracle": Oracle(),
    "window": Window(),
    "snapkv": SnapKV(),
    "tidaldecode": TidalDecode(),
    "loki": Loki(dims=5),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
properties = settings(max_examples=15)
budgets = st.builds(Budget, st.integers(1, 200) | st.floats(0.01, 1.0))
seeds = st.integers(0, 10**6)
query_counts = st.sampled_from([1, 4])
EVEN = Budget(0.1)


@st.composite
def _layers(draw: st.DrawFn) -> SmallLayer:
    """Layers with multipole's clusters, with groups of 1 to 8 heads."""
    middle, softcap = draw(st.integers(20, 160)), draw(st.sampled_from([None, 3.0]))
    repeated, group = draw(st.integers(0, middle)), draw(st.integers(1, 8))
    return small_layer(draw(seeds), middle=middle, softcap=softcap, repeated=repeated, G=group, levels=(0.2,), block=60)


def _with_residual(layer: SmallLayer, method: Method) -> Selector:
    return ResidualSelector(method.prepare(layer.context), residual_clusters(layer.context.tensors))


def _by_own_clusters(layer: SmallLayer, method: Method) -> Selector:
    selector = method.prepare(layer.context)
    assert selector.replace_by_own()
    return selector


@every_method
@properties
@given(layer=_layers(), budget=budgets, queries=query_counts, seed=seeds, has_sinks=st.booleans())
def test_what_a_method_leaves_weighs_as_its_clusters_centroids_do(
    method: Method, layer: SmallLayer, budget: Budget, queries: int, seed: int, has_sinks: bool
) -> None:
    sinks = normal(seed + 9, *layer.queries.shape[:2]) if has_sinks else None
    step = Step(layer, _with_residual(layer, method), budget, queries=queries, seed=seed, sink_logits=sinks)
    counted = tokens_represented(step.selection)
    assert_close(counted, torch.full_like(counted, layer.split.middle), 1e-5)
    assert_close(step.output, step.expected(), 1e-5)


@every_method
@properties
@given(seed=seeds, budget=budgets, queries=query_counts)
def test_one_token_a_cluster_makes_any_choice_dense_attention(
    method: Method, seed: int, budget: Budget, queries: int
) -> None:
    layer = small_layer(seed, middle=60, levels=(1.0,), block=40)
    step = Step(layer, _with_residual(layer, method), budget, queries=queries, seed=seed)
    assert_close(step.output, step.dense(), 1e-5)


@properties
@given(seed=seeds, middle=st.integers(5, 120), queries=query_counts)
def test_one_cluster_of_identical_keys_stands_for_all_of_them_exactly(seed: int, middle: int, queries: int) -> None:
    """Their values differ: alike in weight, they add what their mean does."""
    layer = small_layer(seed, middle=middle, Hk=1, levels=(1 / middle,), block=200, repeated=middle)
    assert layer.context.tensors["level0.counts"].tolist() == [[middle]]
    step = Step(layer, _with_residual(layer, Window()), EVEN, queries=queries, seed=seed)
    assert_close(step.output, step.dense(), 1e-5)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("selection", ["budget", "threshold"])
def test_the_residual_of_one_methods_choice_can_be_in_the_clusters_of_another(queries: int, selection: str) -> None:
    """Squeezed's choice lies in its own order, its residual in multipole's clusters."""
    layer, other = small_layer(5, levels=(0.1,)), small_layer(5, levels=(0.25,), block=64)
    method = Squeezed("flat", selection)
    selector = ResidualSelector(method.prepare(layer.context), residual_clusters(other.context.tensors))
    step = Step(layer, selector, EVEN, queries=queries)
    assert 0 < int(step.selection.rows.lengths.sum()) < layer.split.middle
    assert_close(step.output, step.expected(tensors=other.context.tensors), 1e-5)


@properties
@given(layer=_layers(), budget=budgets, queries=query_counts, seed=seeds)
def test_squeezed_replaces_by_the_centroids_that_it_reads_anyway(
    layer: SmallLayer, budget: Budget, queries: int, seed: int
) -> None:
    step = Step(layer, _by_own_clusters(layer, Squeezed()), budget, queries=queries, seed=seed)
    assert_close(step.output, step.expected(), 1e-5)


@pytest.mark.parametrize("levels", [(0.2, 0.05), (0.4, 0.2, 0.1)], ids=["two levels", "three levels"])
@pytest.mark.parametrize("queries", [1, 4])
def test_a_hierarchy_with_everything_open_replaces_as_the_flat_lookup(levels: tuple[float, ...], queries: int) -> None:
    layer = small_layer(levels=levels)
    flat = layer.context.calibration["decode"]["flat"]
    opened = flat | {"coarse_thresholds": [0.0] * (len(levels) - 1)}
    calibration = {kind: {"flat": flat, "hierarchical": opened} for kind in ("decode", "prefill")}
    layer = replace(layer, context=replace(layer.context, calibration=calibration))
    steps = [
        Step(layer, _by_own_clusters(layer, Squeezed(lookup, "threshold")), EVEN, queries=queries)
        for lookup in ("flat", "hierarchical")
    ]
    assert int(steps[0].selection.rows.lengths.sum()) < 2 * layer.split.middle
    for step in steps:
        assert_close(step.output, step.expected(), 1e-5)


@pytest.mark.parametrize(
    "levels", [(0.1,), (0.2, 0.05), (0.4, 0.2, 0.1)], ids=["one level", "two levels", "three levels"]
)
@pytest.mark.parametrize("share", [0.02, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_a_choice_by_threshold_leaves_no_token_without_one_that_stands_for_it(
    levels: tuple[float, ...], share: float, seed: int
) -> None:
    layer = small_layer(seed, levels=levels, repeated=40)
    selector = _by_own_clusters(layer, Squeezed("hierarchical" if levels[1:] else "flat", "threshold"))
    selection = selector.select(as_queries(layer.queries), Budget(share))
    counted = tokens_represented(selection)
    assert_close(counted, torch.full_like(counted, layer.split.middle), 1e-5)


def test_clusters_of_a_residual_are_those_of_the_finest_level() -> None:
    layer = small_layer(3, levels=(0.2, 0.05), block=80)
    clusters = residual_clusters(layer.context.tensors)
    assert torch.equal(clusters.labels, token_labels(layer.context.tensors))
    assert torch.equal(clusters.counts, layer.context.tensors["level0.counts"])
    for centroids, rows in ((clusters.keys, layer.keys), (clusters.values, layer.values)):
        of_token = centroids.gather(1, clusters.labels[..., None].expand(-1, -1, 16))
        assert_close(of_token, member_means(rows[:, layer.middle], clusters.labels), 1e-5)


@pytest.mark.parametrize(
    ("method", "rows"),
    [(Quest(page_size=16), 2 * 13 + 2 * 40), (Oracle(), 2 * 40), (Window(), 2 * 40)],
    ids=["quest", "oracle", "window"],
)
def test_rows_read_are_the_methods_own_and_both_centroids_of_every_cluster(method: Method, rows: int) -> None:
    """200 tokens: 13 pages, 40 clusters."""
    layer = small_layer(middle=200, levels=(0.2, 0.05), block=80)
    step = Step(layer, _with_residual(layer, method), Budget(10))
    chosen = 0 if isinstance(method, Window) else 10
    assert step.sparse.read.total() == 2 * (2 * chosen + rows)
    assert step.sparse.read.dense == 2 * 2 * 200


@pytest.mark.parametrize("lookup", ["flat", "hierarchical"])
def test_squeezed_reads_a_value_centroid_more_for_each_key_centroid(lookup: str) -> None:
    layer = small_layer(middle=200, levels=(0.2, 0.05))
    step = Step(layer, _by_own_clusters(layer, Squeezed(lookup)), Budget(10))
    chosen = Squeezed(lookup).prepare(layer.context).select(as_queries(step.query), Budget(10))
    looked_at = float(torch.as_tensor(chosen.cost.index_rows).expand(2, 1).sum())
    assert step.sparse.read.total() == 2 * (2 * 10) + 2 * looked_at


@pytest.mark.parametrize(("squeezed", "multipole", "lender"), [(0.2, 0.1, "multipole"), (0.1, 0.2, "squeezed")])
def test_the_fewest_centroids_are_lent(tmp_path: Path, squeezed: float, multipole: float, lender: str) -> None:
    indexers = {"squeezed": SqueezedIndexer(levels=(squeezed,)), "multipole": MultipoleIndexer(levels=(multipole,))}
    index = build_small(tmp_path / "both.skv", methods=indexers)
    assert residual_source(index.artifact) == lender
    selector = prepare_layer(LayerRows(index.artifact, 0), MethodSpec("quest", "", Quest(), residual=True)).selector
    assert isinstance(selector, ResidualSelector)
    lent = index.artifact.method_tensors(lender, 0)["level0.value_centroids"]
    assert torch.equal(selector.clusters.values, lent)


def test_an_index_without_value_centroids_has_no_residual(tmp_path: Path) -> None:
    """An index of no method serves those that need none, but has nothing to stand for what they leave."""
    index = build_small(tmp_path / "bare.skv", methods={})
    with pytest.raises(UsageError, match=r"--residual.*--method multipole"):
        prepare_layer(LayerRows(index.artifact, 0), MethodSpec("quest", "", Quest(), residual=True))
    model = save_tiny(tmp_path / "model")
    for command in (("generate", "Why?", "--model", str(model)), ("recall-report",)):
        outcome = run_here(*command, "--index", tmp_path / "bare.skv", "--method", "quest", "--residual")
        assert outcome.code == 2
        assert f"add them with `sparsekv build-index {tmp_path / 'bare.skv'} --method multipole`" in outcome.error()


def test_tokens_that_an_order_leaves_out_are_in_some_cluster() -> None:
    """An order that names a token twice names another one never."""
    layer = small_layer(levels=(0.2,), block=60)
    order = layer.context.tensors["token_order"].clone()
    order[:, 1:] = order[:, :1]
    with poisoned_memory():
        clusters = residual_clusters(layer.context.tensors | {"token_order": order})
    assert bool(((clusters.labels >= 0) & (clusters.labels < clusters.counts.shape[1])).all())
