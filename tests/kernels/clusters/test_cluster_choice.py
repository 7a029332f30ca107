"""Choosing clusters by kernels: against plain torch, against float64, and properties of any choice."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory, uneven_counts, with_room
from support.pairs import every_pair
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.clusters.cluster_choice import ClusterChoice, choose_clusters
from sparsekv.kernels.clusters.cluster_choice_triton import choose_clusters_triton
from sparsekv.kernels.common.row_operations import expand_runs, fill_budget
from sparsekv.kernels.scores.logits import cluster_scores

pytestmark = compiled_or_interpreted
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
by_dtype = pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=lambda value: str(value))
RESOLUTION = 1 + 2**-7


def first_rows(counts: torch.Tensor) -> torch.Tensor:
    """First rows [H, C] of clusters that follow each other with a gap after each."""
    return (counts + 2).cumsum(-1) - counts


def assert_rows(found: ClusterChoice, starts: torch.Tensor) -> None:
    """The rows are the members that were taken, each once, in any order; the kernels' queue is zero."""
    assert found.queue is None or not found.queue.any()
    assert torch.equal(found.used, found.lengths.sum(-1).int())
    for head, used in enumerate(found.used.tolist()):
        members, _ = expand_runs(starts[head], found.lengths[head], used)
        assert torch.equal(found.rows[head, :used].sort().values, members.sort().values.int())


def choose(
    query: torch.Tensor, centroids: torch.Tensor, counts: torch.Tensor, budget: int, softcap: float | None = None
) -> ClusterChoice:
    """Choice of the kernels, back on the CPU."""
    starts = first_rows(counts)
    moved = [tensor.to(DEVICE) for tensor in (query, centroids, counts, starts)]
    with poisoned_memory():
        found = on_cpu(choose_clusters_triton(*moved, budget, query.shape[2] ** -0.5, softcap), counts.shape[1])
    assert_rows(found, starts)
    return found


def on_cpu(found: ClusterChoice, clusters: int) -> ClusterChoice:
    """A choice cut to its clusters; the padding after them must be minus infinity."""
    logits, log_left = found.logits.cpu(), found.log_left.cpu()
    assert all(bool((one[..., clusters:] == -torch.inf).all()) for one in (logits, log_left))
    cut = logits[..., :clusters], found.lengths.cpu(), log_left[..., :clusters]
    assert found.queue is not None
    return ClusterChoice(*cut, found.rows.cpu(), found.used.cpu(), found.queue.cpu())


def assert_best(scores: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, budget: int) -> None:
    """The best clusters to within the resolution of scores; all whole, except for at most one in each head."""
    assert lengths.sum(-1).tolist() == [min(budget, total) for total in counts.sum(-1).tolist()]
    assert bool(((lengths >= 0) & (lengths <= counts)).all())
    assert int(((lengths > 0) & (lengths < counts)).sum(-1).max()) <= 1
    for head_scores, head_counts, head_lengths in zip(scores, counts, lengths, strict=True):
        taken, left = head_scores[head_lengths > 0], head_scores[(head_lengths == 0) & (head_counts > 0)]
        # Scores below about 2 ** -16 / budget are not distinguished.
        told_apart = left > 2.0**-15 / max(budget, 1)
        assert not len(taken) or not bool(told_apart.any()) or left.max() <= taken.min() * RESOLUTION * 1.001


def test_clusters_in_buffers_with_room() -> None:
    """Tensors of clusters to which tokens are appended have spare capacity."""
    counts = uneven_counts(4, 3, 70)
    query, centroids, starts = normal(0, 3, 2, 64), normal(1, 3, 70, 64), first_rows(counts)
    expected = choose(query, centroids, counts, 90)
    found = choose_clusters_triton(
        query.to(DEVICE), *(with_room(one) for one in (centroids, counts, starts)), 90, 0.125
    )
    assert_rows(replace(found, rows=found.rows.cpu(), lengths=found.lengths.cpu(), used=found.used.cpu()), starts)
    assert torch.equal(found.lengths.cpu(), expected.lengths)


@every_pair({"dtype, tolerance": TOLERANCES.items(), "D": [64, 96, 128, 256], "G": [1, 3, 8]})
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


@pytest.mark.thinned
@pytest.mark.parametrize("clusters", [1, 2, 129, 200])
@pytest.mark.parametrize("budget", [0, 1, 77, 10**6])
def test_the_same_as_in_plain_torch(clusters: int, budget: int) -> None:
    """Exactly: no float32 score here is so near to a boundary between ranks that rounding could move it across."""
    counts = uneven_counts(clusters, 3, clusters)
    query, centroids = normal(2, 3, 4, 64), 2 * normal(3, 3, clusters, 64)
    found, expected = (
        choose(query, centroids, counts, budget),
        choose_clusters.reference(query, centroids, counts, first_rows(counts), budget, 64**-0.5),
    )
    assert_rows(expected, first_rows(counts))
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.log_left.exp().round().int(), counts - found.lengths)


@pytest.mark.thinned
@pytest.mark.parametrize("most_parts", [64, 2])
@pytest.mark.parametrize(("clusters", "budget"), [(1, 77), (128, 77), (300, 0), (300, 77), (300, 250), (300, 10**6)])
def test_the_same_by_many_parts_of_a_head(
    clusters: int, budget: int, most_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parts of 128 clusters, the last one smaller, like larger parts of thousands of clusters; or two at most."""
    for name, value in {"FEWEST": 128, "MOST": 128, "MOST_PARTS": most_parts, "ENTRIES": 16}.items():
        monkeypatch.setattr(f"sparsekv.kernels.clusters.budget_choice_triton.{name}", value)
    counts = uneven_counts(6, 2, clusters)
    query, centroids = normal(2, 2, 4, 64), 2 * normal(3, 2, clusters, 64)
    found = choose(query, centroids, counts, budget)
    expected = choose_clusters.reference(query, centroids, counts, first_rows(counts), budget, 64**-0.5)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.log_left.exp().round().int(), counts - found.lengths)


@given(st.integers(0, 10**6), st.integers(1, 90), st.integers(0, 300))
@settings(max_examples=25)
def test_the_reference_takes_the_best(seed: int, clusters: int, budget: int) -> None:
    counts = uneven_counts(seed, 2, clusters)
    query, centroids = 3 * normal(seed, 2, 2, 16), normal(seed + 1, 2, clusters, 16)
    found = choose_clusters.reference(query, centroids, counts, first_rows(counts), budget, 0.25)
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
    starts, most, seen = first_rows(counts), int(counts.sum(-1).max()), torch.tensor([3, 5])
    tensors = query, centroids, counts, starts
    seen_by_kernels = seen.to(DEVICE, copy=True)
    with poisoned_memory():
        moved = (one.to(DEVICE) for one in tensors)
        found = choose_clusters_triton(*moved, most, 64**-0.5, None, threshold, seen_by_kernels)
    reference = choose_clusters.reference(*tensors, most, 64**-0.5, None, threshold, seen)
    for one, counter in ((on_cpu(found, 300), seen_by_kernels.cpu()), (reference, seen)):
        assert torch.equal(one.lengths, expected.int())
        assert_rows(one, starts)
        assert torch.equal(one.log_left.exp().round().int(), counts - expected)
        assert torch.equal(counter, expected.sum(-1) + torch.tensor([3, 5]))


@pytest.mark.parametrize(("slots", "most_parts"), [(0, 64), (1, 64), (20, 64), (20, 1)])
def test_no_more_members_are_listed_than_there_are_slots(
    slots: int, most_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention that follows reads the first `used` rows, and there are no more than these."""
    for name, value in {"FEWEST": 128, "MOST": 128, "MOST_PARTS": most_parts}.items():
        monkeypatch.setattr(f"sparsekv.kernels.clusters.budget_choice_triton.{name}", value)
    counts, seen = uneven_counts(8, 2, 300), torch.zeros(2, dtype=torch.int64)
    tensors = normal(2, 2, 4, 64), 2 * normal(3, 2, 300, 64), counts, first_rows(counts)
    seen_by_kernels = seen.to(DEVICE, copy=True)
    with poisoned_memory():
        moved = (one.to(DEVICE) for one in tensors)
        found = on_cpu(choose_clusters_triton(*moved, slots, 0.125, None, 0.003, seen_by_kernels), 300)
    expected = choose_clusters.reference(*tensors, slots, 0.125, None, 0.003, seen)
    assert int(expected.lengths.sum(-1).min()) > slots
    assert torch.equal(found.lengths, expected.lengths)
    assert found.used.tolist() == expected.used.tolist() == [slots, slots]
    assert torch.equal(found.rows[:, :slots], expected.rows)
    assert torch.equal(seen_by_kernels.cpu(), seen)


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
    assert int(found.lengths.abs().max()) == 0
    assert found.used.tolist() == [0, 0]


def test_a_cluster_that_holds_nearly_all() -> None:
    counts = torch.ones(2, 30, dtype=torch.int32)
    counts[:, 7] = 5000
    found = choose(normal(0, 2, 2, 64), normal(1, 2, 30, 64), counts, 5000)
    assert found.used.tolist() == [5000, 5000]
