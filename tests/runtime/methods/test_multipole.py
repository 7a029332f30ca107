"""Multipole attention: every token represented once, and the output that the definition gives for that."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import token_labels
from support.random_tensors import normal
from support.reference import assert_close
from support.replaced import EXACT, Step, represented, tokens_represented
from support.rotation import ROPES, windowed_query
from support.small_layer import SmallLayer, as_queries, most_children, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import MethodRecord, RopeFacts
from sparsekv.kernels.kmeans.hierarchy import Level, level_tensors, number_neighbours
from sparsekv.kernels.kmeans.kmeans import cluster_means
from sparsekv.runtime.methods.multipole import Multipole, WindowedMultipole
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Selection

HALF = 10.0  # `opened` for half of the clusters at a budget of 5%
FLAT, HIERARCHICAL = Multipole("flat"), Multipole("hierarchical", opened=HALF)
LEVELS = {1: (0.2,), 2: (0.3, 0.1), 3: (0.4, 0.2, 0.1)}
properties = settings(max_examples=20)
budgets = st.builds(Budget, st.integers(1, 250) | st.floats(0.01, 1.0))
seeds = st.integers(0, 10**6)
query_counts = st.sampled_from([1, 4])


@st.composite
def _layers(draw: st.DrawFn, depths: st.SearchStrategy[int] | None = None, **changes: Any) -> SmallLayer:
    """Layers in one to four blocks, of even and of very uneven clusters, with groups of 1 to 8 heads; of keys as they
    are attended, and with windowed RoPE."""
    middle = draw(st.integers(30, 200))
    depth = draw(st.sampled_from(sorted(LEVELS)) if depths is None else depths)
    drawn = {"G": draw(st.integers(1, 8)), "repeated": draw(st.integers(0, middle)), "levels": LEVELS[depth]}
    drawn |= {"outliers": draw(st.sampled_from([0.0, 0.1])), "rope": draw(st.sampled_from([None, *ROPES.values()]))}
    softcap = draw(st.sampled_from([None, 3.0]))
    return small_layer(
        draw(seeds), middle=middle, softcap=softcap, block=draw(st.integers(40, 200)), **(drawn | changes)
    )


def _lookup(layer: SmallLayer, lookup: str = "flat") -> Multipole:
    method = Multipole if layer.context.facts.rope is None else WindowedMultipole
    return method(lookup if "level1.counts" in layer.context.tensors else "flat", opened=HALF)


def _select(layer: SmallLayer, method: Multipole, budget: Budget, shared: bool) -> Selection:
    selector = method.prepare(layer.context)
    return selector.select(as_queries(layer.queries, joint=shared), budget)


@properties
@given(layer=_layers(), budget=budgets, lookup=st.sampled_from(["flat", "hierarchical"]), shared=st.booleans())
def test_every_token_is_represented_once(layer: SmallLayer, budget: Budget, lookup: str, shared: bool) -> None:
    selection = _select(layer, _lookup(layer, lookup), budget, shared)
    assert selection.rows.lengths.shape[1] == (1 if shared else layer.queries.shape[2])
    counted = tokens_represented(selection)
    assert_close(counted, torch.full_like(counted, layer.split.middle), 1e-5)
    assert_close(
        selection.rows.lengths.sum(-1), torch.tensor(budget.tokens(layer.split.middle)).expand(counted.shape), 0
    )


@properties
@given(layer=_layers(depths=st.just(1)), budget=budgets, queries=query_counts, seed=seeds, has_sinks=st.booleans())
def test_what_is_not_chosen_weighs_as_its_centroids_do_in_one_softmax_with_the_rest(
    layer: SmallLayer, budget: Budget, queries: int, seed: int, has_sinks: bool
) -> None:
    sinks = normal(seed + 9, *layer.queries.shape[:2]) if has_sinks else None
    step = Step(layer, _lookup(layer).prepare(layer.context), budget, queries=queries, seed=seed, sink_logits=sinks)
    assert_close(step.output, step.expected(), 1e-5)


@properties
@given(
    seed=seeds,
    queries=query_counts,
    group=st.integers(1, 8),
    softcap=st.sampled_from([None, 3.0]),
    rope=st.sampled_from([None, *ROPES.values()]),
    clusters=st.sampled_from([{"levels": (1.0,)}, {"levels": (0.1,), "outliers": 1.0}]),
)
def test_one_token_a_cluster_is_dense_attention_with_next_to_no_budget(
    seed: int, queries: int, group: int, softcap: float | None, rope: RopeFacts | None, clusters: dict[str, Any]
) -> None:
    layer = small_layer(seed, middle=70, G=group, softcap=softcap, block=40, rope=rope, **clusters)
    assert bool((layer.context.tensors["level0.counts"] <= 1).all())
    step = Step(layer, _lookup(layer).prepare(layer.context), Budget(1), queries=queries, seed=seed)
    assert int(step.selection.rows.lengths.sum()) == 2
    assert_close(step.output, step.dense(), 1e-5)


def _of_identical_keys(seed: int, kinds: int, tokens: int) -> SmallLayer:
    """A layer whose clusters hold so many tokens of one and the same key each, of values that differ."""
    layer, labels = small_layer(seed, middle=kinds * tokens), torch.arange(kinds * tokens).expand(2, -1) % kinds
    layer.keys[:, layer.middle] = normal(seed + 7, 2, kinds, layer.keys.shape[2])[:, labels[0]]
    levels = [Level(*cluster_means(layer.keys[:, layer.middle], labels, kinds))]
    tensors = level_tensors(levels, number_neighbours(levels, labels), layer.values[:, layer.middle], 0)
    return replace(layer, context=replace(layer.context, tensors=tensors))


@properties
@given(seed=seeds, queries=query_counts, kinds=st.integers(1, 6), tokens=st.integers(1, 30), chosen=st.integers(1, 6))
def test_clusters_of_identical_keys_that_are_chosen_whole_or_not_at_all_are_dense_attention(
    seed: int, queries: int, kinds: int, tokens: int, chosen: int
) -> None:
    layer = _of_identical_keys(seed, kinds, tokens)
    step = Step(layer, FLAT.prepare(layer.context), Budget(chosen * tokens), queries=queries, seed=seed)
    assert_close(step.output, step.dense(), 1e-5)


@properties
@given(layer=_layers(), lookup=st.sampled_from(["flat", "hierarchical"]), queries=query_counts)
def test_a_budget_of_everything_is_dense_attention(layer: SmallLayer, lookup: str, queries: int) -> None:
    step = Step(layer, _lookup(layer, lookup).prepare(layer.context), Budget(1.0), queries=queries)
    assert_close(step.output, step.dense(), 1e-5)


def _levels_that_stand(layer: SmallLayer, step: Step) -> torch.Tensor:
    """[Hk, 1, M]: the finest level whose cluster of a token was scored, by the definition, in float64.

    All of the coarsest level are; of the next ones all children of the best clusters, until these have half of a
    level's at each, and hold the budget.
    """
    tensors, facts, shape = layer.context.tensors, layer.context.facts, step.query.shape
    query, scored_by = windowed_query(step.query, layer.split.tokens, facts.rope)
    depth = sum(name.endswith(".counts") for name in tensors)
    labels = [token_labels(tensors, level) for level in range(depth)]
    stands = torch.full((shape[0], 1, layer.split.middle), depth - 1)
    for head in range(shape[0]):
        scored = list(range(tensors[f"level{depth - 1}.counts"].shape[1]))
        for level in range(depth - 1, 0, -1):
            counts = tensors[f"level{level}.counts"][head, scored].double()
            centroids = tensors[f"level{level}.{scored_by}"][head, scored].double()
            weights = (facts.softmax_scale * query[head] @ centroids.T).exp() * (counts > 0)
            scores = (weights / (counts * weights).sum(-1, keepdim=True)).mean((0, 1))
            best_first = [scored[number] for number in scores.argsort(descending=True).tolist()]
            below, filled = (tensors[f"level{level - 1}.{name}"][head] for name in ("parent", "counts"))
            wanted, tokens, scored = round(len(below) * 0.5 ** (depth - level)), 0, []
            for parent in best_first:
                if len(scored) < wanted or tokens < step.sparse.plan.budget.tokens(layer.split.middle):
                    scored += [n for n in range(len(below)) if below[n] == parent and filled[n] > 0]
                    tokens += int(tensors[f"level{level}.counts"][head, parent])
            stands[head, 0, torch.isin(labels[level - 1][head], torch.tensor(scored))] = level - 1
    return stands


@pytest.mark.thinned
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rope", [None, ROPES["halves"], ROPES["interleaved"]], ids=["as attended", *list(ROPES)[:2]])
def test_a_coarse_cluster_that_is_not_opened_stands_for_its_tokens(
    depth: int, queries: int, seed: int, rope: RopeFacts | None
) -> None:
    layer = small_layer(seed, middle=180, levels=LEVELS[depth], block=80, rope=rope)
    selector = _lookup(layer, "hierarchical").prepare(layer.context)
    step = Step(layer, selector, Budget(0.05), queries=queries, seed=seed + 50)
    level = _levels_that_stand(layer, step)
    assert set(level.flatten().tolist()) == set(range(depth))
    stands = represented(step.selection, step.selector, level, layer.split.middle)
    # What is chosen was scored in the finest level.
    assert not level[stands == EXACT].any()
    assert_close(step.output, step.expected(level), 1e-5)


@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
def test_rows_read_are_both_centroids_of_each_cluster_that_was_scored(shared: bool) -> None:
    """Blocks of 80 and 120 tokens: 40 clusters below 10, of which half are scored, and all children of the last."""
    layer = small_layer(middle=200, levels=(0.2, 0.05), block=80)
    rows = {
        (lookup, replaced): _select(
            layer, Multipole(lookup, replaced, opened=HALF), Budget(0.05), shared
        ).cost.index_rows
        for lookup in ("flat", "hierarchical")
        for replaced in (True, False)
    }
    assert torch.as_tensor(rows["flat", True]).unique().tolist() == [2 * 40]
    assert torch.as_tensor(rows["flat", False]).unique().tolist() == [40]
    with_values, keys_alone = (torch.as_tensor(rows["hierarchical", replaced]) for replaced in (True, False))
    assert torch.equal(with_values, 2 * keys_alone)
    assert bool(((keys_alone >= 10 + 20) & (keys_alone < 10 + 20 + most_children(layer))).all())


def test_fewer_clusters_are_scored_where_fewer_are_opened() -> None:
    layer = small_layer(middle=200, levels=(0.4, 0.1), block=80)
    for opened, wanted in ((1000.0, 40), (8.0, 32), (2.0, 8)):
        method = Multipole("hierarchical", replace=False, opened=opened)
        scored = torch.as_tensor(_select(layer, method, Budget(10), False).cost.index_rows) - 20
        assert bool(((scored >= wanted) & (scored < wanted + most_children(layer))).all())


@pytest.mark.parametrize("lookup", [Multipole, Squeezed])
def test_what_is_opened_holds_the_budget(lookup: type[Multipole] | type[Squeezed]) -> None:
    """However few clusters are wanted: those of one token come first here."""
    layer = small_layer(middle=200, levels=(0.4, 0.1), block=80)
    chosen = _select(layer, lookup("hierarchical", opened=0.01), Budget(40), False)
    assert chosen.rows.lengths.sum(-1).unique().tolist() == [40]


@pytest.mark.parametrize("opened", [0.0, -1.0, float("nan")])
def test_nothing_opened_is_refused(opened: float) -> None:
    with pytest.raises(UsageError, match="--opened"):
        Multipole(opened=opened)


@pytest.mark.parametrize(("method", "rows"), [(FLAT, 80), (Multipole("flat", replace=False), 40)], ids=str)
def test_a_step_counts_the_chosen_rows_and_the_centroids(method: Multipole, rows: int) -> None:
    layer = small_layer(middle=200, levels=(0.2, 0.05), block=80)
    step = Step(layer, method.prepare(layer.context), Budget(10))
    read = step.sparse.read
    assert read.total() == 2 * (2 * 10 + rows)
    assert read.dense == 2 * 2 * 200


def test_a_step_counts_what_it_looks_at_down_a_hierarchy() -> None:
    layer = small_layer(middle=200, levels=(0.2, 0.05), block=80)
    step = Step(layer, HIERARCHICAL.prepare(layer.context), Budget(10))
    assert step.sparse.read.total() == 2 * (2 * 10) + float(torch.as_tensor(step.selection.cost.index_rows).sum())


def test_without_replacement_nothing_stands_for_what_is_not_chosen() -> None:
    layer = small_layer(middle=200, levels=(0.2, 0.05), block=80)
    chosen, replaced = (_select(layer, Multipole("flat", also), Budget(9), False) for also in (False, True))
    assert chosen.attended_segments() == ()
    assert torch.equal(chosen.rows.starts, replaced.rows.starts)
    assert torch.equal(chosen.rows.lengths, replaced.rows.lengths)


def test_variants_are_with_and_without_replacement_and_flat_with_it_is_the_default() -> None:
    one, two = (
        MethodRecord(revision=1, parameters={"levels": levels}, seed=0, calibration={}, built_from={})
        for levels in ([0.0625], [0.125, 0.015625])
    )
    assert list(Multipole.variants(one)) == ["flat", "flat without replacement"]
    assert list(Multipole.variants(two)) == [
        "flat",
        "hierarchical",
        "flat without replacement",
        "hierarchical without replacement",
    ]
    assert Multipole.variants(two)["flat"] == Multipole()
    replaced = {name: method.replaces() for name, method in Multipole.variants(one).items()}
    assert replaced == {"flat": True, "flat without replacement": False}


def test_a_wrong_lookup_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="--lookup deep"):
        Multipole("deep")
    with pytest.raises(UsageError, match="--levels"):
        HIERARCHICAL.prepare(small_layer(levels=(0.1,), block=80).context)
