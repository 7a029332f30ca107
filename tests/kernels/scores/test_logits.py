"""Scores of clusters against their definition in float64 (Squeezed Attention, arXiv 2411.09688, equation 1)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import assert_close, attention_probabilities, random_attention

from sparsekv.kernels.scores.logits import attention_logits, cluster_scores

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def defined_scores(
    query: torch.Tensor, centroids: torch.Tensor, counts: torch.Tensor, scale: float, softcap: float | None = None
) -> torch.Tensor:
    """exp(q C_i) / sum_j N_j exp(q C_j) averaged over the group: [Hk, Q, C] float64."""
    logits = torch.einsum("hgqd,hcd->hgqc", query.double(), centroids.double()) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    total = (logits + counts[:, None, None].double().log()).logsumexp(-1, keepdim=True)
    return (logits - total).exp().mean(1).masked_fill(counts[:, None] == 0, 0)


def random_counts(Hk: int, clusters: int, seed: int = 0) -> torch.Tensor:
    """Counts [Hk, C] int32 with some empty clusters, never the first."""
    counts = torch.randint(0, 400, (Hk, clusters), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    counts[:, 1::5] = 0
    counts[:, 0] = 300
    return counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_scores_equal_their_definition(D: int, dtype: torch.dtype) -> None:
    query, centroids, _ = random_attention(D=D, dtype=dtype)
    counts = random_counts(2, 50)
    scores = cluster_scores(query, centroids, counts, D**-0.5)
    assert scores.dtype == torch.float32
    # Half-precision inputs are scored as exactly as float32 ones: neither logits nor counts are rounded.
    assert_close(scores, defined_scores(query, centroids, counts, D**-0.5), 5e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_on_a_gpu_equal_their_definition(dtype: torch.dtype) -> None:
    query, centroids, _ = (tensor.cuda() for tensor in random_attention(dtype=dtype))
    counts = random_counts(2, 50).cuda()
    scores = cluster_scores(query, centroids, counts, 0.125)
    assert_close(scores, defined_scores(query, centroids, counts, 0.125), 5e-6)


@pytest.mark.parametrize("G", range(1, 9))
def test_scores_are_averaged_over_the_group(G: int) -> None:
    query, centroids, _ = random_attention(Hk=3, G=G, Q=2)
    counts = random_counts(3, 50)
    apart = [cluster_scores(query[:, g : g + 1], centroids, counts, 0.125) for g in range(G)]
    assert_close(cluster_scores(query, centroids, counts, 0.125), torch.stack(apart).double().mean(0), 5e-6)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_logits_are_capped_before_the_softmax(softcap: float) -> None:
    query, centroids, _ = random_attention()
    counts = random_counts(2, 50)
    scores = cluster_scores(query, centroids, counts, 0.125, softcap)
    assert_close(scores, defined_scores(query, centroids, counts, 0.125, softcap), 5e-6)


@given(st.integers(1, 20), st.integers(0, 1000))
@settings(max_examples=30)
def test_estimated_probabilities_of_all_tokens_sum_to_one(clusters: int, seed: int) -> None:
    query, centroids, _ = random_attention(T=clusters, seed=seed)
    counts = random_counts(2, clusters, seed)
    total = (counts[:, None] * cluster_scores(query, centroids, counts, 0.125).double()).sum(-1)
    assert_close(total, torch.ones_like(total), 1e-6)


def test_empty_clusters_score_zero_wherever_their_centroid_points() -> None:
    query, centroids, _ = random_attention()
    counts = random_counts(2, 50)
    scores = cluster_scores(query, centroids, counts, 0.125)
    centroids[:, 1::5] = 1000 * query[:, 0, :1]
    centroids[:, 6] = torch.nan
    assert torch.equal(cluster_scores(query, centroids, counts, 0.125), scores)
    assert not scores.transpose(1, 2)[counts == 0].any()


def test_clusters_of_no_token_at_all_score_zero() -> None:
    query, centroids, _ = random_attention(T=3)
    assert not cluster_scores(query, centroids, torch.zeros(2, 3, dtype=torch.int32), 0.125).any()


@pytest.mark.parametrize("G", [1, 4])
def test_identical_tokens_in_each_cluster_make_the_score_their_attention_probability(G: int) -> None:
    query, centroids, _ = random_attention(G=G, T=9)
    counts = torch.tensor([3, 1, 0, 7, 2, 300, 1, 5, 4]).expand(2, 9)
    keys = centroids.repeat_interleave(counts[0], 1)
    scores = cluster_scores(query, centroids, counts, 0.125).repeat_interleave(counts[0], 2)
    assert_close(scores, attention_probabilities(query, keys, 0.125).mean(1), 2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_logits_do_not_overflow(dtype: torch.dtype) -> None:
    query, centroids, _ = random_attention(dtype=dtype)
    query, centroids = query * 100, centroids * 100
    counts = random_counts(2, 50)
    largest = attention_logits(query, centroids, 1.0).abs().max()
    assert largest > torch.finfo(torch.float16).max
    assert_close(cluster_scores(query, centroids, counts, 1.0), defined_scores(query, centroids, counts, 1.0), 1e-4)
