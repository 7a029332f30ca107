"""Windowed RoPE, online: clusters are chosen by what keys say at one distance, and cost what is read of them."""

import pytest
import torch
from support.random_tensors import normal
from support.rotation import ROPES, rotated, windowed_query
from support.small_layer import SmallLayer, all_chosen, as_queries, most_children, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import MethodRecord, RopeFacts
from sparsekv.runtime.methods.multipole import Multipole, WindowedMultipole
from sparsekv.runtime.selection.interface import Budget, Selection, methods
from sparsekv.runtime.selection.registry import choose_methods

every_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
that_turn = pytest.mark.parametrize("rope", [ROPES["halves"], ROPES["interleaved"]], ids=["halves", "interleaved"])
FAR = 900


def _layer(rope: RopeFacts, seed: int = 0) -> SmallLayer:
    return small_layer(seed, middle=200, levels=(0.2, 0.05), block=80, rope=rope)


def _select(layer: SmallLayer, method: Multipole, query: torch.Tensor, first: int, shared: bool) -> Selection:
    return method.prepare(layer.context).select(as_queries(query, first=first, joint=shared), Budget(30))


@every_rope
@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
@pytest.mark.parametrize("distance", [0, 1024])
def test_clusters_are_chosen_by_the_definition(rope: RopeFacts, shared: bool, distance: int) -> None:
    """S_i = exp(q C_i) / sum_j N_j exp(q C_j) of a query that stands at the distance and keys at position 0."""
    layer, method = _layer(rope), WindowedMultipole(rope_distance=distance)
    chosen = _select(layer, method, layer.queries, FAR, shared)
    query, scored_by = windowed_query(layer.queries, FAR, rope, distance)
    tensors = layer.context.tensors
    logits = 0.2 * query @ tensors[f"level0.{scored_by}"].double().transpose(1, 2)[:, None]
    counts = tensors["level0.counts"]
    scores = ((logits.exp() * (counts > 0)[:, None, None]) / (counts[:, None, None] * logits.exp()).sum(-1, True)).mean(
        1
    )
    scores = scores.mean(1, keepdim=True) if shared else scores
    for head, of_head in enumerate(all_chosen(chosen, method.prepare(layer.context))):
        for of_query, tokens in zip(scores[head], of_head, strict=True):
            best_first = of_query.argsort(descending=True).tolist()
            runs = tensors["token_order"][head].split(counts[head].tolist())
            expected = [int(token) for cluster in best_first for token in runs[cluster]][:30]
            assert set(tokens) == set(expected)


@that_turn
@pytest.mark.parametrize("lookup", ["flat", "hierarchical"])
def test_the_choice_does_not_depend_on_where_the_query_stands(rope: RopeFacts, lookup: str) -> None:
    """The choice of plain multipole does depend on it: its centroids keep the positions of their keys."""
    layer, query = _layer(rope), normal(7, 2, 3, 1, 16)
    chosen: dict[type[Multipole], list[list[list[list[int]]]]] = {Multipole: [], WindowedMultipole: []}
    for kind, found in chosen.items():
        method = kind(lookup)
        for position in (300, 301, 350, FAR):
            there = rotated(query, torch.tensor([position]), rope).float()
            selection = _select(layer, method, there, position, shared=False)
            found.append(
                [[sorted(tokens) for tokens in of] for of in all_chosen(selection, method.prepare(layer.context))]
            )
    assert all(found == chosen[WindowedMultipole][0] for found in chosen[WindowedMultipole])
    assert any(found != chosen[Multipole][0] for found in chosen[Multipole])


@that_turn
def test_the_distance_changes_the_choice(rope: RopeFacts) -> None:
    layer = _layer(rope)
    near, far = (
        _select(layer, WindowedMultipole(rope_distance=distance), layer.queries, FAR, shared=False)
        for distance in (0, 1024)
    )
    assert not torch.equal(near.rows.starts, far.rows.starts) or not torch.equal(near.rows.lengths, far.rows.lengths)


@every_rope
@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
def test_rows_read_are_what_is_scored_and_both_centroids_that_stand_for_tokens(rope: RopeFacts, shared: bool) -> None:
    """Blocks of 80 and 120 tokens: 40 clusters below 10, of which half are scored, and all children of the last."""
    layer = _layer(rope)
    for lookup, fewest, more in (("flat", 40, 1), ("hierarchical", 10 + 20, most_children(layer))):
        for replaced, rows in ((True, 3), (False, 1)):
            selection = _select(layer, WindowedMultipole(lookup, replaced), layer.queries, FAR, shared)
            clusters = torch.as_tensor(selection.cost.index_rows) / rows
            assert bool(((clusters >= fewest) & (clusters < fewest + more)).all())
            assert bool((clusters == clusters.round()).all())


def test_a_report_shows_it_beside_multipole_where_the_index_has_both() -> None:
    record = MethodRecord(revision=1, parameters={"levels": [0.0625]}, seed=0, calibration={}, built_from={})
    assert WindowedMultipole.variants(record) == {
        "flat": WindowedMultipole(),
        "flat without replacement": WindowedMultipole(replace=False),
    }
    assert methods()["multipole-windowed"] is WindowedMultipole
    assert "multipole-windowed" not in choose_methods([], ["multipole"])
    assert {"multipole", "multipole-windowed"} <= set(choose_methods([], ["multipole", "multipole-windowed"]))


def test_a_distance_before_the_query_is_refused_by_its_flag() -> None:
    with pytest.raises(UsageError, match="--rope-distance -1: give 0 or more"):
        WindowedMultipole(rope_distance=-1)
