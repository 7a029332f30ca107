"""Choosing clusters for several questions: kernels against plain torch, and against each question's own choice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory, uneven_counts, with_room
from support.pairs import every_pair
from support.random_tensors import normal

from sparsekv.kernels.clusters import shared_choice_triton
from sparsekv.kernels.clusters.cluster_choice import MOST_TOKENS, SharedChoice, choose_clusters, choose_together
from sparsekv.kernels.clusters.shared_choice_triton import choose_together_triton
from sparsekv.kernels.common.row_operations import expand_runs

pytestmark = compiled_or_interpreted


def first_rows(counts: torch.Tensor) -> torch.Tensor:
    """First rows [H, C] of clusters that follow each other with a gap after each."""
    return (counts + 2).cumsum(-1) - counts


def some_query(seed: int, H: int, G: int, tokens: list[int], D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [H, G, T, D] as a model has them, token by token, and where each question ends."""
    return normal(seed, sum(tokens), H, G, D).permute(1, 2, 0, 3), torch.tensor(tokens).cumsum(0).int()


def chosen(
    query: torch.Tensor, ends: torch.Tensor, centroids: torch.Tensor, counts: torch.Tensor, budget: int,
    softcap: float | None = None, thresholds: torch.Tensor | None = None,
) -> SharedChoice:  # fmt: skip
    """The choice of the kernels, back on the CPU and cut to its clusters."""
    (H, C), starts, scale = counts.shape, first_rows(counts), query.shape[3] ** -0.5
    seen, capacity = torch.ones(H, dtype=torch.int64, device=DEVICE), int(counts.sum(-1).max())
    moved = [one.to(DEVICE) for one in (query, ends, centroids, counts, starts)]
    limits = None if thresholds is None else thresholds.to(DEVICE)
    with poisoned_memory():
        found = choose_together_triton(*moved, budget, capacity, scale, softcap, limits, seen)
    lengths, log_left, rows, used = (one.cpu() for one in (found.lengths, found.log_left, found.rows, found.used))
    assert bool((log_left[:, C:] == -torch.inf).all())
    assert torch.equal(used, lengths.sum(-1).int())
    assert torch.equal(seen.cpu(), 1 + used.long())
    assert torch.equal(log_left[:, :C].exp().round().int(), counts - lengths)
    for head, number in enumerate(used.tolist()):
        members, _ = expand_runs(starts[head], lengths[head], number)
        assert torch.equal(rows[head, :number].sort().values, members.sort().values.int())
    return SharedChoice(lengths, log_left[:, :C], rows, used)


@every_pair({"dtype": [torch.float32, torch.float16, torch.bfloat16], "D": [64, 96, 128, 256], "G": [1, 3, 8]})
def test_the_best_by_scores_in_float64(G: int, D: int, dtype: torch.dtype) -> None:
    """One question of three tokens takes the clusters with the highest mean over its tokens and heads. The kernel may
    differ within the resolution of scores and the rounding of logits."""
    counts, (query, ends) = uneven_counts(D + G, 2, 37), some_query(0, 2, G, [3], D)
    query, centroids = query.to(dtype), (1.5 * normal(1, 2, 37, D)).to(dtype)
    lengths = chosen(query, ends, centroids, counts, 50).lengths
    logits = torch.einsum("hgtd,hcd->hgtc", query.double(), centroids.double()) * D**-0.5
    weights = logits.masked_fill(counts[:, None, None] == 0, -torch.inf).exp()
    scores = (weights / (weights * counts[:, None, None]).sum(-1, keepdim=True)).mean((1, 2))
    assert lengths.sum(-1).tolist() == [50, 50]
    for one, of_head, taken in zip(scores, counts, lengths, strict=True):
        assert one[(taken == 0) & (of_head > 0)].max() <= one[taken > 0].min() * 1.03


@every_pair(
    {
        "G, tokens": [(1, [1]), (3, [1, 5, 2]), (8, [1] * 17), (4, [3, 29, 1])],
        "clusters": [1, 37, 200],
        "budget": [0, 1, 77, 10**6],
    }
)
def test_the_same_as_in_plain_torch(G: int, tokens: list[int], clusters: int, budget: int) -> None:
    assert_same(G, tokens, clusters, budget)


def test_soft_caps() -> None:
    assert_same(3, [1, 5, 2], 37, 77, softcap=2.0)


def test_more_programs_than_sms() -> None:
    assert_same(1, [1] * 24, 37, 77)


def test_as_many_tokens_as_a_head_may_have() -> None:
    """Sizes of clusters are added up in the bits below their ranks."""
    counts = torch.full((2, 100), MOST_TOKENS // 100, dtype=torch.int32)
    counts[:, 0] += MOST_TOKENS % 100
    query, ends = some_query(2, 2, 2, [1, 1, 1], 64)
    centroids, starts, budget = normal(3, 2, 100, 64), first_rows(counts), MOST_TOKENS // 4
    arguments = query, ends, centroids, counts, starts
    # No rows are listed, which would take the interpreter minutes.
    found = choose_together_triton(*(one.to(DEVICE) for one in arguments), budget, 0, 0.125)
    assert torch.equal(found.lengths.cpu(), choose_together.reference(*arguments, budget, 0, 0.125).lengths)


def assert_same(G: int, tokens: list[int], clusters: int, budget: int, softcap: float | None = None) -> None:
    """Assert that kernels and plain torch make the same choice."""
    counts, (query, ends) = uneven_counts(clusters, 3, clusters), some_query(2, 3, G, tokens, 64)
    centroids, capacity = 2 * normal(3, 3, clusters, 64), int(counts.sum(-1).max())
    found = chosen(query, ends, centroids, counts, budget, softcap)
    expected = choose_together.reference(
        query, ends, centroids, counts, first_rows(counts), budget, capacity, 0.125, softcap
    )
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.used, expected.used)


@pytest.mark.parametrize("capacity", [0, 1, 60])
def test_no_more_rows_are_listed_than_there_are_slots(capacity: int) -> None:
    counts, (query, ends) = uneven_counts(5, 3, 90), some_query(2, 3, 4, [1, 5, 2], 64)
    arguments = query, ends, 2 * normal(3, 3, 90, 64), counts, first_rows(counts)
    seen = [torch.zeros(3, dtype=torch.int64, device=device) for device in (DEVICE, torch.device("cpu"))]
    moved = (one.to(DEVICE) for one in arguments)
    found = choose_together_triton(*moved, 77, capacity, 0.125, None, None, seen[0])
    expected = choose_together.reference(*arguments, 77, capacity, 0.125, None, None, seen[1])
    assert torch.equal(found.lengths.cpu(), expected.lengths)
    assert torch.equal(found.rows[:, :capacity].cpu(), expected.rows)
    assert found.used.tolist() == expected.used.tolist() == seen[0].tolist() == seen[1].tolist() == [capacity] * 3


@pytest.mark.parametrize("tokens", [[1, 5, 2], [1] * 20])
def test_thresholds_of_questions(tokens: list[int]) -> None:
    counts, (query, ends) = uneven_counts(5, 3, 90), some_query(2, 3, 4, tokens, 64)
    centroids, limits = 2 * normal(3, 3, 90, 64), torch.linspace(3e-3, 5e-2, len(tokens))
    capacity = int(counts.sum(-1).max())
    found = chosen(query, ends, centroids, counts, 0, None, limits)
    expected = choose_together.reference(
        query, ends, centroids, counts, first_rows(counts), 0, capacity, 0.125, None, limits
    )
    assert torch.equal(found.lengths, expected.lengths)
    assert 0 < int(found.used.max()) < capacity


@given(
    st.integers(0, 1000), st.integers(1, 8), st.lists(st.just(1), min_size=1, max_size=6), st.integers(1, 60),
    st.integers(0, 150),
)  # fmt: skip
@settings(max_examples=20)
def test_each_question_has_what_it_would_choose_alone(
    seed: int, G: int, tokens: list[int], clusters: int, budget: int
) -> None:
    counts, (query, ends) = uneven_counts(seed, 2, clusters), some_query(seed, 2, G, tokens, 64)
    centroids = normal(seed + 1, 2, clusters, 64)
    found = chosen(query, ends, centroids, counts, budget)
    alone = [
        choose_clusters.reference(query[:, :, t], centroids, counts, first_rows(counts), budget, 0.125).lengths
        for t in range(len(tokens))
    ]
    assert torch.equal(found.lengths, torch.stack(alone).amax(0))


def test_clusters_in_buffers_with_room() -> None:
    """Tensors of clusters to which tokens are appended have spare capacity."""
    counts, (query, ends) = uneven_counts(4, 3, 70), some_query(0, 3, 2, [1, 1, 3], 64)
    centroids, starts = normal(1, 3, 70, 64), first_rows(counts)
    expected = chosen(query, ends, centroids, counts, 90)
    roomy = [with_room(one) for one in (centroids, counts, starts)]
    capacity = int(counts.sum(-1).max())
    found = choose_together_triton(query.to(DEVICE), ends.to(DEVICE), *roomy, 90, capacity, 0.125)
    assert torch.equal(found.lengths.cpu(), expected.lengths)


def test_a_head_of_empty_clusters_takes_nothing() -> None:
    counts, (query, ends) = torch.tensor([[0, 0, 0], [3, 0, 2]], dtype=torch.int32), some_query(0, 2, 2, [2], 64)
    found = chosen(query, ends, normal(1, 2, 3, 64), counts, 4)
    assert found.used.tolist() == [0, 4]


def test_many_rows_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_choice_triton, "PROGRAMS_PER_SM", 16)
    monkeypatch.setattr(shared_choice_triton, "CLUSTERS_A_WARP", 32)
    counts, (query, ends) = uneven_counts(7, 2, 400), some_query(2, 2, 8, [1, 40, 3], 64)
    centroids, capacity = normal(3, 2, 400, 64), int(counts.sum(-1).max())
    found = chosen(query, ends, centroids, counts, 200)
    expected = choose_together.reference(query, ends, centroids, counts, first_rows(counts), 200, capacity, 0.125)
    assert torch.equal(found.lengths, expected.lengths)
