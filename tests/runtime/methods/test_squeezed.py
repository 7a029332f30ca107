"""Squeezed selection: exactly the budget, in order of score, whole clusters; and what its limits equal."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.small_layer import TAIL, SmallLayer, all_chosen, as_queries, most_children, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import MethodRecord
from sparsekv.runtime.methods.oracle import OracleSelector
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.clusters.selector import ClusterSelector
from sparsekv.runtime.selection.interface import Budget, Selection

FLAT, HIERARCHICAL = Squeezed("flat"), Squeezed("hierarchical")
BY_THRESHOLD = Squeezed("flat", "threshold")
properties = settings(max_examples=20)


@st.composite
def _layers(draw: st.DrawFn) -> SmallLayer:
    """Layers with clusters of even and of very uneven size, in one to three levels."""
    middle = draw(st.integers(20, 200))
    levels = draw(st.sampled_from([(0.2,), (1.0, 0.2), (0.3, 0.1), (0.4, 0.2, 0.1)]))
    return small_layer(draw(st.integers(0, 10**6)), middle=middle, levels=levels, repeated=draw(st.integers(0, middle)))


budgets = st.builds(Budget, st.integers(1, 300) | st.floats(0.01, 1.0))


def _select(
    layer: SmallLayer, method: Squeezed, budget: Budget, shared: bool = False
) -> tuple[ClusterSelector, Selection]:
    selector = method.prepare(layer.context)
    return selector, selector.select(as_queries(layer.queries, joint=shared), budget)


def _chosen(layer: SmallLayer, method: Squeezed, budget: Budget, shared: bool = False) -> list[list[list[int]]]:
    selector, selection = _select(layer, method, budget, shared)
    return all_chosen(selection, selector)


def _scores(layer: SmallLayer, level: int, shared: bool) -> torch.Tensor:
    """S_i [Hk, Q or 1, C] of all clusters of a level by its definition, in float64."""
    counts = layer.context.tensors[f"level{level}.counts"].double()[:, None, None]
    centroids = layer.context.tensors[f"level{level}.centroids"].double()
    logits = layer.context.facts.softmax_scale * torch.einsum("hgqd,hcd->hgqc", layer.queries.double(), centroids)
    weights = logits.exp() * (counts > 0)
    scores = (weights / (counts * weights).sum(-1, keepdim=True)).mean(1)
    return scores.mean(1, keepdim=True) if shared else scores


def _cluster_of(layer: SmallLayer) -> torch.Tensor:
    """[Hk, M]: the finest cluster of each middle token."""
    offsets, order = (layer.context.tensors[name].long() for name in ("token_offsets", "token_order"))
    rows = torch.arange(order.shape[1]).expand_as(order).contiguous()
    return torch.empty_like(order).scatter_(1, order, torch.searchsorted(offsets[:, 1:].contiguous(), rows, right=True))


@properties
@given(layer=_layers(), budget=budgets, lookup=st.sampled_from(["flat", "hierarchical"]), shared=st.booleans())
def test_chosen_tokens_are_distinct_and_exactly_the_budget(
    layer: SmallLayer, budget: Budget, lookup: str, shared: bool
) -> None:
    if lookup == "hierarchical" and lookup not in layer.context.calibration["decode"]:
        lookup = "flat"
    selector, selection = _select(layer, Squeezed(lookup), budget, shared)
    wanted = budget.tokens(layer.split.middle)
    assert selection.rows.starts.shape[1] == (1 if shared else layer.queries.shape[2])
    assert selection.rows.capacity >= wanted
    for of_head in all_chosen(selection, selector):
        for tokens in of_head:
            assert len(tokens) == len(set(tokens)) == wanted


@properties
@given(layer=_layers(), budget=budgets, shared=st.booleans())
def test_whole_clusters_are_taken_in_order_of_score_and_the_last_one_in_part(
    layer: SmallLayer, budget: Budget, shared: bool
) -> None:
    selector, selection = _select(layer, FLAT, budget, shared)
    scores, cluster_of = _scores(layer, 0, shared), _cluster_of(layer)
    for head, of_head in enumerate(all_chosen(selection, selector)):
        counts = layer.context.tensors["level0.counts"][head].tolist()
        for query, tokens in enumerate(of_head):
            of_query = scores[head, query]
            clusters = sorted(set(cluster_of[head, tokens].tolist()), key=lambda one: -float(of_query[one]))
            taken = [cluster_of[head, tokens].tolist().count(cluster) for cluster in clusters]
            assert taken[:-1] == [counts[cluster] for cluster in clusters[:-1]]
            ordered = scores[head, query, clusters]
            assert bool((ordered.diff() <= 1e-5 * ordered[:-1]).all())
            untouched = [cluster for cluster in range(len(counts)) if counts[cluster] and cluster not in clusters]
            if untouched:
                assert float(ordered[-1]) >= float(scores[head, query, untouched].max()) * (1 - 1e-5)


@properties
@given(layer=_layers(), method=st.sampled_from([FLAT, BY_THRESHOLD]), shared=st.booleans())
def test_a_budget_of_everything_selects_everything(layer: SmallLayer, method: Squeezed, shared: bool) -> None:
    selector, selection = _select(layer, method, Budget(1.0), shared)
    for of_head in all_chosen(selection, selector):
        for tokens in of_head:
            assert sorted(tokens) == list(range(layer.split.middle))


@properties
@given(seed=st.integers(0, 10**6), budget=budgets, group=st.sampled_from([1, 3]), softcap=st.sampled_from([None, 4.0]))
@example(seed=770142, budget=Budget(19), group=1, softcap=None)  # scores of two tokens agree to one in a million
def test_with_one_token_a_cluster_the_choice_is_the_oracles(
    seed: int, budget: Budget, group: int, softcap: float | None
) -> None:
    """S_i is then the softmax over the middle alone, averaged over the group.

    The oracle averages probabilities of the softmax over everything attended. The two rank alike when nothing else
    is attended, or when the group is one head: what else is attended scales a head's probabilities as a whole. Each
    rounds its scores by itself, so that tokens whose scores in float64 agree to one part in 100,000 may change places.
    """
    layer = small_layer(seed, middle=60, G=group, levels=(1.0,), softcap=softcap)
    assert bool((layer.context.tensors["level0.counts"] == 1).all())
    _, selection = _select(layer, FLAT, budget)
    selector = FLAT.prepare(layer.context)
    other = normal(seed, *layer.queries.shape[:3]) if group == 1 else None
    oracle = OracleSelector(layer.context)
    best = oracle.select(as_queries(layer.queries, other), budget)
    scores = _scores(layer, 0, shared=False).gather(-1, _cluster_of(layer)[:, None].expand(-1, TAIL, -1))
    pairs = zip(all_chosen(selection, selector), all_chosen(best, oracle), scores, strict=True)
    for ours, theirs, of_tokens in pairs:
        for one, other_one, of_token in zip(ours, theirs, of_tokens, strict=True):
            assert len(set(one)) == len(set(other_one)) == budget.tokens(60)
            swapped = of_token[sorted(set(one) ^ set(other_one))]
            assert not len(swapped) or float(swapped.max()) <= float(swapped.min()) * (1 + 1e-5)


@pytest.mark.parametrize("levels", [(0.2, 0.05), (0.4, 0.2, 0.1)], ids=["two levels", "three levels"])
@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_a_hierarchy_with_everything_open_chooses_as_the_flat_lookup(
    levels: tuple[float, ...], shared: bool, share: float
) -> None:
    layer = small_layer(levels=levels, repeated=40)
    flat = layer.context.calibration["prefill" if shared else "decode"]["flat"]
    opened = flat | {"coarse_thresholds": [0.0] * (len(levels) - 1)}
    calibration = {kind: {"flat": flat, "hierarchical": opened} for kind in ("decode", "prefill")}
    layer = replace(layer, context=replace(layer.context, calibration=calibration))
    chosen = [
        _chosen(layer, Squeezed(lookup, "threshold"), Budget(share), shared) for lookup in ("flat", "hierarchical")
    ]
    for flat_head, deep_head in zip(*chosen, strict=True):
        assert [set(tokens) for tokens in flat_head] == [set(tokens) for tokens in deep_head]
    assert any(any(flat_head) for flat_head in chosen[0])


@properties
@given(
    layer=_layers(),
    shares=st.tuples(st.floats(0.002, 0.9), st.floats(0.002, 0.9)).map(sorted),
    shared=st.booleans(),
)
def test_a_smaller_share_by_threshold_chooses_a_part_of_what_a_larger_one_does(
    layer: SmallLayer, shares: list[float], shared: bool
) -> None:
    # Tokens of a share are rounded, so that the two can come out as one.
    less, more = (_chosen(layer, BY_THRESHOLD, Budget(share), shared) for share in shares)
    for fewer_tokens, more_tokens in zip(less, more, strict=True):
        assert all(set(a) <= set(b) for a, b in zip(fewer_tokens, more_tokens, strict=True))


@pytest.mark.parametrize("lookup", ["flat", "hierarchical"])
@pytest.mark.parametrize("levels", [(0.2, 0.05), (0.4, 0.2, 0.1)], ids=["two levels", "three levels"])
@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.3, 0.8])  # from 0.3 on, a hierarchy scores all finest clusters
def test_a_threshold_keeps_its_share_of_the_calibration_queries(
    lookup: str, levels: tuple[float, ...], share: float
) -> None:
    layer = small_layer(middle=400, levels=levels)
    layer = replace(layer, queries=layer.queries[:, :, : layer.split.tail // 2])
    _, selection = _select(layer, Squeezed(lookup, "threshold"), Budget(share))
    kept = selection.rows.lengths.sum(-1).double() / layer.split.middle
    assert float(kept.mean()) == pytest.approx(share, abs=0.01)
    assert float(kept.std()) > 0


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_threshold_keeps_a_few_of_many_tokens(tokens: int) -> None:
    """Less than a thousandth of the document."""
    layer = small_layer(middle=4000, levels=(0.3,))
    layer = replace(layer, queries=layer.queries[:, :, : layer.split.tail // 2])
    _, selection = _select(layer, BY_THRESHOLD, Budget(tokens))
    assert float(selection.rows.lengths.sum(-1).double().mean()) == pytest.approx(tokens, abs=0.3)


def test_each_coarse_threshold_is_used_at_its_own_level() -> None:
    """Everything passes the coarsest level, and of the next one the best cluster alone, by a threshold out of reach."""
    layer = small_layer(levels=(0.4, 0.2, 0.1))
    flat = layer.context.calibration["decode"]["flat"]
    found = {"flat": flat, "hierarchical": {"curve": flat["curve"], "coarse_thresholds": [0.0, 2.0]}}
    calibration = {"decode": found, "prefill": found}
    layer = replace(layer, context=replace(layer.context, calibration=calibration))
    _, selection = _select(layer, Squeezed("hierarchical", "threshold"), Budget(0.1))
    best = _scores(layer, 1, shared=False).argmax(-1)
    children = torch.stack([torch.bincount(parent, minlength=40) for parent in layer.context.tensors["level0.parent"]])
    assert torch.equal(torch.as_tensor(selection.cost.index_rows), 20 + 40 + children.gather(1, best))


def test_a_question_is_looked_up_by_the_threshold_for_questions() -> None:
    layer = small_layer()
    never, always = ([[0.001, high], [0.5, high], [1.0, 0.0]] for high in (2.0, 1e-30))
    curves = {"decode": never, "prefill": always}
    calibration = {kind: {"flat": {"curve": curve, "coarse_thresholds": []}} for kind, curve in curves.items()}
    layer = replace(layer, context=replace(layer.context, calibration=calibration))
    assert not any(any(tokens) for tokens in _chosen(layer, BY_THRESHOLD, Budget(0.1)))
    assert [[len(tokens) for tokens in head] for head in _chosen(layer, BY_THRESHOLD, Budget(0.1), shared=True)] == [
        [layer.split.middle]
    ] * 2


def test_uneven_clusters_never_leave_a_hierarchical_choice_short() -> None:
    """160 equal keys make one cluster; half of the others hold far less than the budget."""
    layer = small_layer(middle=200, levels=(0.2, 0.05), repeated=160)
    assert int(layer.context.tensors["level0.counts"].max()) >= 160
    _, selection = _select(layer, HIERARCHICAL, Budget(0.25))
    assert bool((selection.rows.lengths.sum(-1) == 50).all())


def test_no_token_is_chosen_twice_where_what_is_opened_has_fewer_children_than_slots() -> None:
    """Four levels over 160 tokens; the better half of the tree has a tenth of the clusters below."""
    parents = [torch.arange(80) // 2, torch.cat([torch.arange(4), 4 + torch.arange(36) // 9]), torch.arange(8) // 4]
    counts = [torch.full((1, 80), 2)]
    centroids = [torch.where(torch.arange(80) < 8, 1.0, -1.0)[None, :, None]]
    for parent in parents:
        sums = torch.zeros(1, int(parent[-1]) + 1, dtype=torch.int64).scatter_add_(1, parent[None], counts[-1])
        means = torch.zeros(1, sums.shape[1], 1)
        means[0].index_copy_(0, parent, centroids[-1][0])
        counts.append(sums)
        centroids.append(means)
    centroids[0][0, :2] = 2.0
    tensors = {f"level{level}.parent": parent[None] for level, parent in enumerate(parents)}
    tensors |= {f"level{level}.counts": tokens for level, tokens in enumerate(counts)}
    tensors |= {f"level{level}.centroids": means for level, means in enumerate(centroids)}
    tensors |= {"token_order": torch.arange(160)[None], "token_offsets": torch.arange(0, 161, 2)[None]}
    context = replace(small_layer().context, tensors=tensors, calibration={"decode": {"flat": {}, "hierarchical": {}}})
    query = torch.ones(1, 1, 1, 1)
    selector = HIERARCHICAL.prepare(context)
    selection = selector.select(as_queries(query), Budget(10))
    tokens = all_chosen(selection, selector)[0][0]
    assert tokens[:4] == [0, 1, 2, 3]
    assert len(set(tokens)) == 10
    assert max(tokens) < 16


@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
def test_rows_read_are_the_centroids_that_were_scored(shared: bool) -> None:
    layer = small_layer(middle=200, levels=(0.2, 0.05))
    _, flat = _select(layer, FLAT, Budget(0.05), shared)
    assert flat.cost.index_rows == 40
    _, deep = _select(layer, Squeezed("hierarchical", opened=10.0), Budget(0.05), shared)
    rows = torch.as_tensor(deep.cost.index_rows)
    assert rows.shape == flat.rows.starts.shape[:2]
    # Half of the clusters, and all children of the last that was opened.
    assert bool(((rows >= 10 + 20) & (rows < 10 + 20 + most_children(layer))).all())


def test_a_large_budget_goes_without_the_hierarchy() -> None:
    layer = small_layer(middle=200, levels=(0.2, 0.05))
    assert _chosen(layer, FLAT, Budget(0.3)) == _chosen(layer, HIERARCHICAL, Budget(0.3))


def test_variants_are_those_the_index_was_calibrated_for_and_flat_is_the_default() -> None:
    one, two = (
        MethodRecord(revision=2, parameters={"levels": levels}, seed=0, calibration={}, built_from={})
        for levels in ([0.1], [0.1, 0.03])
    )
    assert list(Squeezed.variants(one)) == ["flat", "flat threshold"]
    assert list(Squeezed.variants(two)) == ["flat", "hierarchical", "flat threshold", "hierarchical threshold"]
    assert Squeezed.variants(two)["flat"] == Squeezed()


@pytest.mark.parametrize(
    ("parameters", "named"), [({"lookup": "deep"}, "--lookup deep"), ({"selection": "best"}, "--selection best")]
)
def test_an_unknown_lookup_or_selection_is_refused_by_name(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Squeezed(**parameters)


def test_a_hierarchical_lookup_of_one_level_says_how_to_build_two() -> None:
    with pytest.raises(UsageError, match="--levels"):
        HIERARCHICAL.prepare(small_layer(levels=(0.1,)).context)
