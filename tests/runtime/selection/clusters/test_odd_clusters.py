"""Clusters that an index may hold though no indexer makes them: all tokens in one, most of them empty, rows twice."""

from collections.abc import Callable

import pytest
import torch
from support.pairs import every_pair
from support.random_tensors import normal
from support.small_layer import SmallLayer, as_queries, small_layer, sparse_layer
from support.small_tables import tabled_layer

from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method
from sparsekv.runtime.selection.wrappers import ResidualSelector, residual_clusters

Tensors = dict[str, torch.Tensor]


def _held_by(tensors: Tensors, fine: int, coarse: int) -> None:
    """Let one cluster of each level hold all tokens; the fine one, and all empty ones, are children of the coarse."""
    tokens = tensors["token_order"].shape[1]
    for level, number in enumerate((fine, coarse)):
        counts = torch.zeros_like(tensors[f"level{level}.counts"])
        counts[:, number] = tokens
        tensors[f"level{level}.counts"] = counts
    tensors["token_offsets"] = torch.nn.functional.pad(tensors["level0.counts"].cumsum(1), (1, 0)).int()
    tensors["level0.parent"] = torch.full_like(tensors["level0.parent"], coarse)


def _in_the_first(tensors: Tensors) -> None:
    _held_by(tensors, 0, 0)


def _in_the_last(tensors: Tensors) -> None:
    _held_by(tensors, -1, tensors["level1.counts"].shape[1] - 1)


def _one_row_only(tensors: Tensors) -> None:
    tensors["token_order"] = torch.full_like(tensors["token_order"], 7)


ODD: dict[str, Callable[[Tensors], None]] = {
    "all tokens in the first cluster": _in_the_first,
    "all tokens in the last cluster": _in_the_last,
    "one token in all places": _one_row_only,
}
METHODS: dict[str, Method] = {
    "flat": Squeezed(),
    "down levels": Squeezed("hierarchical"),
    "by threshold": Squeezed(selection="threshold"),
    "down levels by threshold": Squeezed("hierarchical", selection="threshold"),
    "replaced": Multipole(),
    "replaced down levels": Multipole("hierarchical"),
}


def _odd_layer(odd: str) -> SmallLayer:
    layer = small_layer(middle=100)
    ODD[odd](layer.context.tensors)
    return layer


@every_pair({"odd": ODD, "name": METHODS, "budget": [1, 30, 100]})
@torch.inference_mode()
def test_a_choice_and_a_step_are_within_the_middle(odd: str, name: str, budget: int) -> None:
    layer = _odd_layer(odd)
    if METHODS[name].replaces():
        tensors = layer.context.tensors
        tensors |= {f"level{n}.value_centroids": tensors[f"level{n}.centroids"] for n in range(2)}
    selector = METHODS[name].prepare(layer.context)
    for shared in (False, True):
        chosen = selector.select(as_queries(layer.queries, joint=shared), Budget(budget))
        assert bool(((chosen.rows.starts >= 0) & (chosen.rows.lengths >= 0)).all())
        assert bool((chosen.rows.starts + chosen.rows.lengths <= 100).all())
        assert bool((chosen.rows.lengths.sum(-1) <= chosen.rows.capacity).all())
    step = sparse_layer(layer, selector, Budget(budget))
    keys = normal(5, 1, len(layer.keys), 1, layer.keys.shape[2])
    step.update(keys, keys)
    query = layer.queries[:, :, :1].flatten(0, 1)
    assert step.attend(AttentionCall(0, query, keys[0], keys[0], 0.2, None, None, None)).isfinite().all()


@pytest.mark.parametrize("odd", ODD)
def test_such_clusters_stand_for_what_another_method_leaves(odd: str) -> None:
    tensors = _odd_layer(odd).context.tensors
    layer = small_layer(middle=100)
    tensors["level0.value_centroids"] = tensors["level0.centroids"]
    selector = ResidualSelector(Quest(page_size=7).prepare(layer.context), residual_clusters(tensors))
    chosen = selector.select(as_queries(layer.queries), Budget(30))
    assert chosen.attended_segments()[0].log_counts.shape[-1] == tensors["level0.counts"].shape[1]


@pytest.mark.parametrize("entries", [1, 20])
def test_lists_that_name_one_token_again_and_again(entries: int) -> None:
    layer = tabled_layer().layer
    tensors = layer.context.tensors
    for name, fill in (("table_tokens", layer.context.first_token + 59), ("table_scores", 1)):
        tensors[name] = torch.full_like(tensors[name][..., :1].expand(*tensors[name].shape[:3], entries), fill)
    chosen = CSAttention().prepare(layer.context).select(as_queries(layer.queries), Budget(10))
    assert bool(((chosen.rows.starts >= 0) & (chosen.rows.starts < 60)).all())
