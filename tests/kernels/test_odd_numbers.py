"""Kernels with NaN, infinite or huge inputs: any choice is allowed, but every index that they return must be valid."""

from dataclasses import fields, replace

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory, uneven_counts
from support.odd_numbers import FEW, KINDS, every_kind, few_kinds, odd
from support.random_tensors import normal
from support.small_tables import SMALL, layer_input, tabled_layer

from sparsekv.kernels.attention.chunk_rows_triton import chunk_rows_triton
from sparsekv.kernels.attention.decode_attention import decode_attention
from sparsekv.kernels.attention.decode_attention_triton import decode_attention_triton
from sparsekv.kernels.clusters.cluster_choice import (
    Children,
    ClusterChoice,
    choose_clusters,
    choose_listed,
    open_clusters,
)
from sparsekv.kernels.clusters.cluster_choice_triton import (
    choose_clusters_triton,
    choose_listed_triton,
    open_clusters_triton,
)
from sparsekv.kernels.common.kernel_inputs import RunRows, ScoredCentroids
from sparsekv.kernels.kmeans.kmeans import assign_plainly, cluster_means
from sparsekv.kernels.kmeans.kmeans_triton import NearestCentres, cluster_means_triton
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys, rank_rows, rank_tokens, top_ranked
from sparsekv.kernels.posting_lists.list_ranks_triton import rank_tokens_triton
from sparsekv.kernels.posting_lists.posting_lists import encode_lists
from sparsekv.kernels.posting_lists.top_ranks_triton import rank_rows_triton, top_ranked_triton
from sparsekv.kernels.scores.quoka import best_keys, quoka_scores, subselect_queries
from sparsekv.kernels.scores.quoka_triton import far_directions_triton, nearest_keys_triton

# In the interpreter numpy warns of each such number.
pytestmark = [*compiled_or_interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
SCALE = 0.3
by_form = pytest.mark.parametrize("form", ["kernels", "torch"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def assert_filled(found: ClusterChoice, counts: torch.Tensor, budget: int) -> None:
    """Each head has `budget` tokens, or all of its tokens if it has fewer; its rows are valid, and none is twice."""
    lengths, used, rows = found.lengths.cpu(), found.used.cpu(), found.rows.cpu()
    assert bool(((lengths >= 0) & (lengths <= counts)).all())
    assert lengths.sum(-1).tolist() == used.tolist() == [min(budget, total) for total in counts.sum(-1).tolist()]
    for head, number in enumerate(used.tolist()):
        assert rows[head, :number].unique().numel() == number
        assert bool(((rows[head, :number] >= 0) & (rows[head, :number] < counts[head].sum())).all())


def some_clusters(kind: str) -> list[torch.Tensor]:
    """Query, centroids, counts and first rows of the clusters of two heads."""
    counts = uneven_counts(0, 2, 21)
    rows = normal(0, 2, 3, 32), normal(1, 2, 21, 32)
    return on_device(*odd(kind, *rows), counts, counts.cumsum(-1) - counts)


@pytest.fixture(autouse=True)
def few_clusters_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsekv.kernels.clusters.budget_choice_triton.MOST", 16)


@few_kinds
@by_form
def test_clusters_to_a_budget(form: str, kind: str) -> None:
    choose = choose_clusters_triton if form == "kernels" else choose_clusters.reference
    clusters = some_clusters(kind)
    with poisoned_memory():
        assert_filled(choose(*clusters, 40, SCALE), clusters[2].cpu(), 40)


@few_kinds
@by_form
def test_clusters_by_threshold(form: str, kind: str) -> None:
    choose = choose_clusters_triton if form == "kernels" else choose_clusters.reference
    clusters = some_clusters(kind)
    counts, seen = clusters[2].cpu(), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    most = int(counts.sum(-1).max())
    with poisoned_memory():
        found = choose(*clusters, most, SCALE, None, 0.01, seen)
    lengths = found.lengths.cpu()
    assert bool(((lengths == 0) | (lengths == counts)).all())
    assert_filled(found, lengths, most)
    assert torch.equal(seen.cpu(), found.used.cpu().long())


@few_kinds
@by_form
def test_clusters_down_two_levels(form: str, kind: str) -> None:
    """Opened children are valid and fit in the slots, and the choice among them fills the budget."""
    kernels = open_clusters_triton, choose_listed_triton
    opening, choosing = kernels if form == "kernels" else (open_clusters.reference, choose_listed.reference)
    query, fine, counts, first_row = some_clusters(kind)
    clusters, coarse = counts.shape[1], odd(kind, query.cpu(), normal(2, 2, 6, 32))[1]
    parent = torch.arange(clusters) * 6 // clusters
    numbers = parent.bincount().int().expand(2, -1).contiguous()
    tokens = torch.zeros(2, 6, dtype=torch.int32).scatter_add_(1, parent.expand(2, -1), counts.cpu())
    coarse, tokens, *of_coarse = on_device(coarse, tokens, numbers, (numbers.cumsum(-1) - numbers).int())
    with poisoned_memory():
        opened = opening(query, coarse, tokens, Children(*of_coarse, slots=clusters), 9, 20, SCALE)
        listed = choosing(query, fine, counts, first_row, (opened.rows, opened.used), 20, SCALE)
    for rows, number in zip(opened.rows.cpu(), opened.used.tolist(), strict=True):
        assert 9 <= number == rows[:number].unique().numel()
        assert bool(((rows[:number] >= 0) & (rows[:number] < clusters)).all())
    assert listed.chosen.used.tolist() == [20, 20]


@pytest.mark.thinned
@by_form
@pytest.mark.parametrize(("centroids", "kind"), [*((8, kind) for kind in KINDS), *((6, kind) for kind in FEW)])
def test_ranks_of_listed_tokens_and_of_rows_looked_at_again(centroids: int, form: str, kind: str) -> None:
    """The nearest list exists, also where kernels pad the number of lists; and no padding after the last key is ranked
    above a key."""
    ranking, again, top = (
        (rank_tokens_triton, rank_rows_triton, top_ranked_triton)
        if form == "kernels"
        else (rank_tokens.reference, rank_rows.reference, top_ranked.reference)
    )
    given = layer_input(3, middle=60)
    query, keys, exact = odd(kind, normal(4, 2, 2, 16), given.keys, normal(5, 2, 9, 16))
    lists = encode_lists(tabled_layer(3, replace(SMALL, centroids=centroids), given).tables, "mean")
    moved = {field.name: getattr(lists, field.name) for field in fields(lists)}
    lists = replace(lists, **{name: one.to(DEVICE) for name, one in moved.items() if isinstance(one, torch.Tensor)})
    query, keys, exact = on_device(query, keys, exact)
    with poisoned_memory():
        ranked = ranking(query, lists, ExactKeys(exact), 20, SCALE)
        chosen = top(ranked, 20)
        best = top(again(query, keys, chosen, ranked.logsumexp, 7, SCALE), 7, chosen)
    for rows, wanted in ((chosen.cpu(), 20), (best.cpu(), 7)):
        assert rows.shape[1] == wanted
        assert bool(((rows >= 0) & (rows < 60)).all())
        assert bool((rows.diff(dim=-1) > 0).all())


@pytest.mark.thinned
@every_kind
@by_form
@by_dtype
def test_attention_ends(dtype: torch.dtype, form: str, kind: str) -> None:
    """Over rows in runs, single rows that programs take from a queue, exact rows and centroids."""
    attention = decode_attention_triton if form == "kernels" else decode_attention.reference
    H, G, D, M, C = 2, 3, 16, 40, 9
    query, keys, values = odd(kind, *(normal(seed, H, size, D).to(dtype) for seed, size in enumerate((G, M, M))))
    _, logits, left = odd(kind, query.float(), normal(4, H, G, C), normal(5, H, C))
    numbers = torch.arange(C, dtype=torch.int32).expand(H, -1).contiguous()
    query, keys, values, logits, left, numbers = on_device(query, keys, values, logits, left, numbers)
    stands = [ScoredCentroids(logits, left, values[:, :C].contiguous()), ScoredCentroids(logits, left, values, numbers)]
    exact = keys[:, 30:].contiguous(), values[:, 30:].contiguous()
    starts = 3 * numbers
    runs = RunRows(keys, values, starts, torch.ones_like(starts).cumsum(-1, dtype=torch.int32), 9)
    queue = torch.zeros(H, dtype=torch.int32, device=DEVICE)
    single = RunRows(keys, values, starts, None, 9, torch.full_like(queue, 5), queue)
    for some in (runs, single):
        with poisoned_memory():
            assert attention(query, some, exact, stands, SCALE).shape == (H, G, D)


@pytest.mark.thinned
@every_kind
@by_form
@by_dtype
def test_keys_nearest_to_odd_queries(dtype: torch.dtype, form: str, kind: str) -> None:
    query, keys = on_device(*odd(kind, normal(0, 2, 2, 30, 16).to(dtype), normal(1, 2, 80, 16).to(dtype)))
    with poisoned_memory():
        if form == "kernels":
            chosen = nearest_keys_triton(far_directions_triton(query, 4), keys, 20, 2, 3)
            chunk_rows_triton(query.flatten(0, 1), keys, keys, chosen)
        else:
            chosen = best_keys(quoka_scores(subselect_queries(query, 4), keys)[:, 0], 20, 2, 3)
    chosen = chosen.cpu().sort(-1).values
    assert bool((chosen.diff(dim=-1) > 0).all())
    assert bool(((chosen >= 0) & (chosen < 80)).all())


@pytest.mark.thinned
@every_kind
@by_form
@by_dtype
def test_labels_of_odd_points(dtype: torch.dtype, form: str, kind: str) -> None:
    points, centres = on_device(*odd(kind, normal(0, 2, 40, 16).to(dtype), normal(1, 2, 21, 16).to(dtype)))
    with poisoned_memory():
        labels = NearestCentres(points, 21)(centres) if form == "kernels" else assign_plainly(points, centres)
        cluster_means_triton(points, labels, 21) if form == "kernels" else cluster_means.reference(points, labels, 21)
    assert bool(((labels >= 0) & (labels < 21)).all())
