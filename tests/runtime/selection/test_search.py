"""Searching lists by token: what it chooses and counts, and on a GPU a whole step beside the one that reads lists."""

from dataclasses import replace

import pytest
import torch
from support.kernel_runs import DEVICE
from support.near_best import NearBest, as_mask
from support.random_tensors import normal
from support.small_tables import SMALL, TabledLayer, layer_input, tabled_layer

from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys
from sparsekv.kernels.posting_lists.posting_lists import estimate_logits, look_up
from sparsekv.runtime.methods.csattention import FEWEST_KEYS, CSAttention, ListSearch
from sparsekv.runtime.selection.interface import Budget, InPlace, Queries, Selection

WHOLE = CSAttentionIndexer(subspace_size=16, centroids=40, alpha=1.0, query_sample=64)


def as_queries(query: torch.Tensor, exact: torch.Tensor) -> Queries:
    """One query [Hk, G, 1, D] beside exact keys [Hk, E, D], to attend in place."""
    beside = (0.3 * query[:, :, 0].float() @ exact.float().transpose(1, 2)).logsumexp(-1)[..., None]
    positions = torch.zeros(1, dtype=torch.int64, device=query.device)
    return Queries(
        query,
        lambda: positions,
        lambda: beside,
        joint=False,
        in_place=InPlace(torch.zeros(len(query), dtype=torch.int64, device=query.device), ExactKeys(exact)),
    )


def search(tabled: TabledLayer, asked: Queries, tokens: int, rerank: float) -> Selection:
    found = ListSearch(tabled.tables, "mean", None, tabled.layer.context.facts)
    assert asked.in_place is not None
    return found.select(asked.query[:, :, 0], asked.in_place.exact, tabled.layer.context.keys, tokens, rerank)


def overlap(found: Selection, expected: Selection) -> float:
    """The smallest share of a head's choice that is in another one."""
    pairs = zip(found.rows.starts[:, 0].tolist(), expected.rows.starts[:, 0].tolist(), strict=True)
    return min(len(set(one) & set(other)) / len(one) for one, other in pairs)


@pytest.mark.parametrize("rerank", [1.0, 2.0])
def test_it_chooses_what_the_lists_as_they_are_do(rerank: float) -> None:
    tabled = tabled_layer(2, SMALL, layer_input(2, middle=2000))
    step = as_queries(tabled.layer.queries[:, :, :1], normal(1, 2, 20, 16))
    found = search(tabled, step, 200, rerank)
    expected = CSAttention(rerank=rerank).prepare(tabled.layer.context).select(step, Budget(200))
    assert found.rows.starts.shape == expected.rows.starts.shape == (2, 1, 200)
    assert bool((found.rows.starts.diff(dim=-1) > 0).all())
    assert overlap(found, expected) >= 0.9
    assert found.rows.total == found.rows.capacity == int(found.rows.lengths[0].sum()) == 200


@pytest.mark.parametrize("seed", [3, 12, 13, 14, 15])
def test_reranked_among_everything_they_are_the_best_by_exact_logits(seed: int) -> None:
    """But for those that ranks, a sixteenth of the mantissas and at most one off, do not tell apart. Probabilities are
    relative to what the lists estimate in all, to 8 parts in 100, or to what the keys weigh where that is more."""
    tabled = tabled_layer(seed, SMALL, layer_input(seed, middle=500))
    step = as_queries(tabled.layer.queries[:, :, :1], normal(1, 2, 20, 16))
    found = search(tabled, step, 50, 10.0)
    query, keys = step.query[:, :, 0], tabled.layer.context.keys
    estimated = (0.3 * estimate_logits(tabled.tables, look_up(tabled.tables, query), "mean").double()).logsumexp(-1)
    logits = 0.3 * query.double() @ keys.double().transpose(1, 2)
    total = torch.logaddexp(estimated, step.exact_logsumexp()[..., 0].double()).maximum(logits.logsumexp(-1))
    scores = (logits - total[..., None]).exp().mean(1)
    chosen = as_mask(found.rows.starts[:, 0], 500)
    assert chosen.sum(-1).tolist() == [50, 50]
    NearBest.of_all(scores).best(scores, 50, 1.08 * (1 + 3 / 16)).check(chosen)


def test_every_byte_that_a_head_reads_is_counted() -> None:
    """Half a byte of each key, in whole tiles, in a list of every subspace for every query; all centroids; and the
    candidates' keys."""
    tabled = tabled_layer(2, SMALL, layer_input(2, middle=5000))
    step = as_queries(tabled.layer.queries[:, :, :1], normal(1, 2, 20, 16))
    row = 16 * 4
    lists, centroids = 2 * 4 * 8192 / 2, 4 * 6 * 4 * 4
    assert search(tabled, step, 100, 1.0).cost.index_rows == (lists + centroids) / row
    assert search(tabled, step, 100, 1.5).cost.index_rows == (lists + centroids) / row + 50


@pytest.mark.gpu
@pytest.mark.parametrize("middle", [FEWEST_KEYS, 16 * FEWEST_KEYS + 100])
@pytest.mark.parametrize("rerank", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_on_a_gpu(dtype: torch.dtype, rerank: float, middle: int) -> None:
    """It waits for nothing, gives the same again, and chooses what it does on a CPU, but for scores too near to tell
    apart."""
    tabled = tabled_layer(4, SMALL, layer_input(4, middle=middle, D=64))
    keys, exact = tabled.given.keys.to(dtype), normal(1, 2, 20, 64).to(dtype)
    query = tabled.layer.queries[:, :, :1].to(dtype)
    moved = {name: tensor.to(DEVICE) for name, tensor in tabled.tensors.items()}
    context = replace(tabled.layer.context, load_keys=lambda: keys.to(DEVICE), tensors=moved)
    selector, step = CSAttention(rerank=rerank).prepare(context), as_queries(query.to(DEVICE), exact.to(DEVICE))
    selector.select(step, Budget(0.05))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, again = selector.select(step, Budget(0.05)), selector.select(step, Budget(0.05))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.rows.starts, again.rows.starts)
    near = replace(tabled, layer=replace(tabled.layer, context=replace(tabled.layer.context, load_keys=lambda: keys)))
    expected = search(near, as_queries(query, exact), found.rows.capacity, rerank)
    assert overlap(found, expected) >= 0.95
    assert found.cost.index_rows == expected.cost.index_rows


def test_exact_keys_weigh_the_heads_of_a_group() -> None:
    """A query that attends to an exact key alone has no say in what is chosen."""
    tabled = tabled_layer(5, WHOLE, layer_input(5, middle=400, positions=8))
    query = tabled.given.queries
    assert query is not None
    step = query.unflatten(0, (2, -1))[:, :, :1].clone()
    taken_by_exact = 40 * torch.nn.functional.normalize(step[:, 1], dim=-1)
    both = search(tabled, as_queries(step, taken_by_exact), 40, 1.0)
    alone = search(tabled, as_queries(step[:, :1], normal(1, 2, 1, 16)), 40, 1.0)
    assert overlap(both, alone) >= 0.9
    neither = search(tabled, as_queries(step, normal(1, 2, 1, 16)), 40, 1.0)
    assert overlap(neither, alone) < 0.8
