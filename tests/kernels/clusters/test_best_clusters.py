"""Choosing clusters on a CPU, against the definition in float64 (arXiv 2411.09688, equation 1)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import assert_close, random_attention

from sparsekv.kernels.clusters.cluster_choice import BestClusters, CountedClusters, best_clusters, logs_and_shares

SCALE = 0.125
G = 3


def uneven_counts(Hk: int, C: int, seed: int) -> torch.Tensor:
    """Counts [Hk, C] int32: log-normal sizes, a fifth of them 0, with the same sum in each head."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randn(Hk, C, generator=generator).exp().mul(9).round().int()
    counts[torch.rand(Hk, C, generator=generator) < 0.2] = 0
    counts[:, 0] += counts.sum(1).max() + 1 - counts.sum(1)
    return counts


def counted(centroids: torch.Tensor, counts: torch.Tensor) -> CountedClusters:
    logs, shares = logs_and_shares(counts)
    return CountedClusters(centroids, counts, logs[:, None], shares, int(counts[0].sum()))


def defined_scores(
    query: torch.Tensor, centroids: torch.Tensor, counts: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [Hk, G, C] and scores [Hk, C] in float64."""
    logits = torch.einsum("hgd,hcd->hgc", query.double(), centroids.double()) * SCALE
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    total = (logits + counts[:, None].double().log()).logsumexp(-1, keepdim=True)
    return logits, (logits - total).exp().mean(1).masked_fill(counts == 0, 0)


def taken_of_each(best: BestClusters, counts: torch.Tensor) -> torch.Tensor:
    """Number of tokens [Hk, C] taken of each cluster."""
    return torch.zeros(counts.shape, dtype=torch.int64).scatter_add_(1, best.clusters, best.lengths)


@given(
    Hk=st.integers(1, 4),
    C=st.integers(1, 300),
    share=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_the_best_clusters_fill_the_budget(
    Hk: int, C: int, share: float, dtype: torch.dtype, softcap: float | None, seed: int
) -> None:
    query, centroids, _ = random_attention(Hk=Hk, G=G, Q=1, T=C, dtype=dtype, seed=seed)
    counts = uneven_counts(Hk, C, seed)
    everything = int(counts[0].sum())
    budget = max(1, round(share * everything))
    best = best_clusters(query[:, :, 0], counted(centroids, counts), budget, SCALE, softcap)
    logits, scores = defined_scores(query[:, :, 0], centroids, counts, softcap)
    there = (counts > 0)[:, None].expand_as(logits)
    whole = logits + counts[:, None].double().log()
    assert_close(best.logits[there], whole[there], 5e-6)
    assert (best.logits[~there] == -torch.inf).all()
    taken = taken_of_each(best, counts)
    assert (taken.sum(1) == budget).all()
    assert (taken <= counts).all()
    assert torch.equal(best.left, counts.gather(1, best.clusters) - best.lengths)
    for head in range(Hk):
        cut = (taken[head] > 0) & (taken[head] < counts[head])
        assert int(cut.sum()) <= 1
        chosen, others = scores[head][taken[head] > 0], scores[head][taken[head] < counts[head]]
        if len(others):
            assert float(chosen.min()) >= (1 - 1e-4) * float(others.max())


@given(st.integers(1, 3), st.integers(2, 80), st.integers(0, 1000), st.floats(0, 1))
@settings(max_examples=30)
def test_what_is_left_is_counted_once(Hk: int, C: int, seed: int, share: float) -> None:
    query, centroids, _ = random_attention(Hk=Hk, G=G, Q=1, T=C, seed=seed)
    counts = uneven_counts(Hk, C, seed)
    clusters = counted(centroids, counts)
    best = best_clusters(query[:, :, 0], clusters, max(1, int(share * counts[0].sum())), SCALE)
    logs = clusters.log_counts + best.log_share_left(clusters.shares)
    assert logs.shape == (Hk, 1, C)
    left = logs.exp()[:, 0]
    assert_close(left, (counts - taken_of_each(best, counts)).double(), 1e-6)


def test_many_small_clusters_may_be_the_best_ones() -> None:
    """Then more clusters are needed than `expected` returns."""
    C = 400
    query, centroids = torch.ones(2, G, 8), torch.zeros(2, C, 8)
    centroids[:, 10:] = torch.linspace(20, 10, C - 10)[:, None]
    counts = torch.ones(2, C, dtype=torch.int32)
    counts[:, :10] = 1000
    clusters = counted(centroids, counts)
    assert clusters.expected(300) < 300
    best = best_clusters(query, clusters, 300, SCALE)
    taken = taken_of_each(best, counts)
    assert torch.equal(taken, ((torch.arange(C) >= 10) & (torch.arange(C) < 310)).long().expand(2, -1))


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_logits_far_from_each_other_neither_overflow_nor_vanish(far: float) -> None:
    centroids = torch.zeros(1, 6, 8)
    centroids[0, 3] = far
    counts = torch.tensor([[2, 0, 5, 1, 4, 0]], dtype=torch.int32)
    best = best_clusters(torch.ones(1, G, 8), counted(centroids, counts), 12, SCALE)
    assert taken_of_each(best, counts).tolist() == counts.tolist()
