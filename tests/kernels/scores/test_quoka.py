"""QuoKA's scores against their definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close, random_attention

from sparsekv.kernels.scores.quoka import key_norms, quoka_scores, subselect_queries

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
properties = settings(max_examples=30)


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cosine_similarity(a.double(), b.double(), dim=-1)


def defined_scores(query: torch.Tensor, keys: torch.Tensor, similarity: str, across: str) -> torch.Tensor:
    """Scores [Hk, 1 or Q, T] float64: those of each head, averaged over the group, then combined over the queries."""
    each = torch.einsum("hgqd,htd->hgqt", query.double(), keys.double())
    if similarity == "cosine":
        each = cosines(query[:, :, :, None], keys[:, None, None])
    grouped = each.mean(1)
    return {"max": grouped.amax(1, keepdim=True), "mean": grouped.mean(1, keepdim=True), "none": grouped}[across]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("G", [1, 2, 8])
def test_pooled_scores_equal_the_mean_of_each_heads_own(G: int, D: int, dtype: torch.dtype) -> None:
    query, keys, _ = random_attention(G=G, D=D, dtype=dtype)
    # The averaged query is rounded once to the keys' dtype.
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for similarity in ("cosine", "dot"):
        for across in ("max", "mean", "none"):
            scores = quoka_scores(query, keys, None, similarity, across)
            assert scores.dtype == torch.float32
            assert_close(scores, defined_scores(query, keys, similarity, across), tolerance)


def test_known_norms_are_used_as_they_are() -> None:
    query, keys, _ = random_attention()
    assert_close(quoka_scores(query, keys, 2 * key_norms(keys)), quoka_scores(query, keys).double() / 2, 1e-6)


def test_keys_and_queries_of_nothing_have_no_direction_and_score_nothing() -> None:
    query, keys, _ = random_attention()
    keys[:, 3], query[:, :, 1] = 0, 0
    scores = quoka_scores(query, keys, across="none")
    assert bool((scores[:, :, 3] == 0).all())
    assert bool((scores[:, 1] == 0).all())


@properties
@given(seed=st.integers(0, 10**6), queries=st.integers(1, 40), count=st.integers(1, 50), G=st.integers(1, 4))
def test_the_queries_least_like_their_mean_are_kept(seed: int, queries: int, count: int, G: int) -> None:
    query = normal(seed, 2, G, queries, 8)
    kept = subselect_queries(query, count)
    nearness = cosines(query, query.mean(2, keepdim=True))
    found = cosines(kept, query.mean(2, keepdim=True)).sort(-1).values
    assert kept.shape == (2, G, min(count, queries), 8)
    assert_close(found, nearness.sort(-1).values[..., : kept.shape[2]], 1e-5)


@properties
@given(seed=st.integers(0, 10**6), queries=st.integers(1, 40), count=st.integers(1, 50))
def test_other_subsets_are_queries_of_the_chunk_each_once(seed: int, queries: int, count: int) -> None:
    query = torch.arange(queries).float().view(1, 1, -1, 1).expand(2, 3, -1, 4)
    drawn = subselect_queries(query, count, "random", seed)
    assert drawn.shape[2] == min(count, queries)
    assert len(set(drawn[0, 0, :, 0].tolist())) == drawn.shape[2]
    assert torch.equal(drawn, subselect_queries(query, count, "random", seed))
    assert subselect_queries(query, count, "all") is query


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_on_a_gpu_equal_their_definition(dtype: torch.dtype) -> None:
    query, keys, _ = (tensor.cuda() for tensor in random_attention(dtype=dtype))
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    scores = quoka_scores(subselect_queries(query, 100), keys)
    assert_close(scores.cpu(), defined_scores(query.cpu(), keys.cpu(), "cosine", "max"), tolerance)
