"""Choosing clusters by kernels: against plain torch, against float64, and what is promised of any choice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory, uneven_counts
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.cluster_choice import ClusterChoice, choose_clusters_reference, keep_clusters_reference
from sparsekv.kernels.cluster_choice_triton import choose_clusters_triton, keep_clusters_triton
from sparsekv.kernels.lookup import cluster_scores
from sparsekv.kernels.runs import fill_budget

pytestmark = compiled_or_interpreted
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
by_dtype = pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=lambda value: str(value))
RESOLUTION = 1 + 2**-7


def choose(
    query: torch.Tensor, centroids: torch.Tensor, counts: torch.Tensor, budget: int, softcap: float | None = None
) -> ClusterChoice:
    """What the kernels choose, back on the CPU."""
    moved = [tensor.to(DEVICE) for tensor in (query, centroids, counts)]
    with poisoned_memory():
        found = choose_clusters_triton(*moved, budget, query.shape[2] ** -0.5, softcap)
    every = [getattr(found, name).cpu() for name in ("logits", "lengths", "ends", "log_left")]
    assert all(bool((one[..., counts.shape[1] :] == -torch.inf).all()) for one in (every[0], every[3]))
    return ClusterChoice(*(one[..., : counts.shape[1]] for one in every))


def assert_best(scores: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, budget: int) -> None:
    """Whole clusters, the best ones as far as scores are told apart, and at most one of each head in part."""
    assert lengths.sum(-1).tolist() == [min(budget, total) for total in counts.sum(-1).tolist()]
    assert bool(((lengths >= 0) & (lengths <= counts)).all())
    assert int(((lengths > 0) & (lengths < counts)).sum(-1).max()) <= 1
    for head_scores, head_counts, head_lengths in zip(scores, counts, lengths, strict=True):
        taken, left = head_scores[head_lengths > 0], head_scores[(head_lengths == 0) & (head_counts > 0)]
        # Of those below the best 2 ** 16 times what the budget's tokens could have each, none is told from another.
        told_apart = left > 2.0**-15 / max(budget, 1)
        assert not len(taken) or not bool(told_apart.any()) or left.max() <= taken.min() * RESOLUTION * 1.001


@by_dtype
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("G", [1, 3, 8])
def test_logits_and_choice(G: int, D: int, dtype: torch.dtype, tolerance: float) -> None:
    counts = uneven_counts(D + G, 2, 37)
    query, centroids = normal(0, 2, G, D).to(dtype), (1.5 * normal(1, 2, 37, D)).to(dtype)
    found = choose(query, centroids, counts, 50)
    exact = torch.einsum("hgd,hcd->hgc", query.double(), centroids.double()) * D**-0.5
    filled = counts > 0
    assert bool((found.logits[~filled[:, None].expand(-1, G, -1)] == -torch.inf).all())
    assert_close(found.logits.masked_fill(~filled[:, None], 0), exact.masked_fill(~filled[:, None], 0), tolerance)
    weights = exact.masked_fill(~filled[:, None], -torch.inf).exp()
    assert_best((weights / (weights * counts[:, None]).sum(-1, keepdim=True)).mean(1), counts, found.lengths, 50)


@pytest.mark.parametrize("clusters", [1, 2, 129, 200])
@pytest.mark.parametrize("budget", [0, 1, 77, 10**6])
def test_the_same_as_in_plain_torch(clusters: int, budget: int) -> None:
    """To the token: in float32 no two scores here are so near to a boundary that rounding moves one."""
    counts = uneven_counts(clusters, 3, clusters)
    query, centroids = normal(2, 3, 4, 64), 2 * normal(3, 3, clusters, 64)
    found, expected = (
        choose(query, centroids, counts, budget),
        choose_clusters_reference(query, centroids, counts, budget, 64**-0.5),
    )
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.ends, expected.ends)
    assert torch.equal(found.log_left.exp().round().int(), counts - found.lengths)


@pytest.mark.parametrize(("clusters", "budget"), [(1, 77), (128, 77), (700, 0), (700, 77), (700, 600), (700, 10**6)])
def test_the_same_by_many_programs_a_head(clusters: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 128 clusters, the last one not full, as with many thousands in larger parts."""
    for name, value in {"FEWEST": 128, "MOST": 128, "PASSED": 128, "MOST_ALONE": 0}.items():
        monkeypatch.setattr(f"sparsekv.kernels.budget_choice_triton.{name}", value)
    counts = uneven_counts(6, 2, clusters)
    query, centroids = normal(2, 2, 4, 64), 2 * normal(3, 2, clusters, 64)
    found = choose(query, centroids, counts, budget)
    expected = choose_clusters_reference(query, centroids, counts, budget, 64**-0.5)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.ends, expected.ends)
    assert torch.equal(found.log_left.exp().round().int(), counts - found.lengths)


@given(st.integers(0, 10**6), st.integers(1, 90), st.integers(0, 300))
@settings(max_examples=25, deadline=None)
def test_the_reference_takes_the_best(seed: int, clusters: int, budget: int) -> None:
    counts = uneven_counts(seed, 2, clusters)
    query, centroids = 3 * normal(seed, 2, 2, 16), normal(seed + 1, 2, clusters, 16)
    found = choose_clusters_reference(query, centroids, counts, budget, 0.25)
    scores = cluster_scores(query[:, :, None], centroids, counts, 0.25)[:, 0]
    assert_best(scores, counts, found.lengths, budget)


def test_scores_far_apart_are_chosen_as_by_a_sort() -> None:
    counts = uneven_counts(5, 2, 60)
    query = torch.ones(2, 1, 64)
    centroids = (0.02 * torch.arange(60.0))[None, :, None].expand(2, 60, 64)[:, torch.randperm(60)].contiguous()
    scores = cluster_scores(query[:, :, None], centroids, counts, 64**-0.5)[:, 0]
    order = scores.argsort(dim=-1, descending=True, stable=True)
    expected = torch.zeros_like(counts).scatter_(-1, order, fill_budget(counts.gather(-1, order), 40).int())
    assert torch.equal(choose(query, centroids, counts, 40).lengths, expected)


@pytest.mark.parametrize("threshold", [0.0, 0.003, 0.02, 2.0])
def test_all_that_reach_a_threshold(threshold: float) -> None:
    counts = uneven_counts(8, 2, 300)
    query, centroids = normal(2, 2, 4, 64), 2 * normal(3, 2, 300, 64)
    scores = cluster_scores(query[:, :, None].double(), centroids.double(), counts, 64**-0.5)[:, 0]
    expected = counts * (scores >= threshold)
    with poisoned_memory():
        found = keep_clusters_triton(*(one.to(DEVICE) for one in (query, centroids, counts)), threshold, 64**-0.5)
    for one in (found, keep_clusters_reference(query, centroids, counts, threshold, 64**-0.5)):
        assert torch.equal(one.lengths.cpu(), expected.int())
        assert torch.equal(one.ends.cpu(), expected.cumsum(-1).int())
        assert torch.equal(one.log_left.cpu()[:, :300].exp().round().int(), counts - expected)


def test_equal_scores_are_taken_in_order() -> None:
    counts = torch.full((1, 40), 3, dtype=torch.int32)
    found = choose(torch.ones(1, 2, 64), torch.ones(1, 40, 64), counts, 10)
    assert found.lengths[0, :5].tolist() == [3, 3, 3, 1, 0]


def test_a_soft_cap() -> None:
    counts = uneven_counts(9, 2, 50)
    query, centroids = 4 * normal(4, 2, 3, 64), normal(5, 2, 50, 64)
    found = choose(query, centroids, counts, 30, softcap=2.0)
    exact = 2 * torch.tanh(torch.einsum("hgd,hcd->hgc", query.double(), centroids.double()) / 8 / 2)
    empty = (counts == 0)[:, None]
    assert_close(found.logits.masked_fill(empty, 0), exact.masked_fill(empty, 0), 1e-5)


def test_heads_without_any_token() -> None:
    nothing = torch.zeros(2, 20, dtype=torch.int32)
    found = choose(normal(0, 2, 2, 64), normal(1, 2, 20, 64), nothing, 10)
    assert int(found.ends.abs().max()) == 0
