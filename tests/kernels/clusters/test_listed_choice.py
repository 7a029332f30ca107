"""Choosing in two levels by kernels: opening clusters, and choosing among their children."""

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory, uneven_counts, with_room
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.clusters.cluster_choice import Children, ClusterChoice, ListedChoice, choose_listed, open_clusters
from sparsekv.kernels.clusters.cluster_choice_triton import choose_listed_triton, open_clusters_triton
from sparsekv.kernels.common.row_operations import expand_runs
from sparsekv.kernels.scores.logits import cluster_scores

pytestmark = compiled_or_interpreted
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Levels:
    """Two levels of H heads: fine clusters numbered by parent, and coarse ones with mostly 0 to 12 children.

    centroids [H, C, D], counts and first_row [H, C] of the fine ones; coarse [H, P, D], tokens, children and
    first_child [H, P].
    """

    centroids: torch.Tensor
    counts: torch.Tensor
    first_row: torch.Tensor
    coarse: torch.Tensor
    tokens: torch.Tensor
    children: torch.Tensor
    first_child: torch.Tensor

    def of_coarse(self, device: torch.device, slots: int, seen: torch.Tensor | None = None) -> Children:
        return Children(self.children.to(device), self.first_child.to(device), slots, seen)


def some_levels(seed: int, *, H: int = 2, parents: int = 30, D: int = 64) -> Levels:
    generator = torch.Generator().manual_seed(seed)
    children = torch.randint(0, 13, (H, parents), generator=generator)
    children[:, 0] += children.sum(1).max() + 1 - children.sum(1)
    clusters = int(children.sum(1)[0])
    counts = uneven_counts(seed, H, clusters).clamp(min=1)
    parent = torch.stack([torch.arange(parents).repeat_interleave(row) for row in children])
    tokens = torch.zeros_like(children).scatter_add_(1, parent, counts.long())
    coarse, fine = normal(seed, H, parents, D), normal(seed + 1, H, clusters, D)
    first_child, first_row = children.cumsum(1) - children, counts.cumsum(1) - counts
    return Levels(2 * fine, counts, first_row.int(), 2 * coarse, tokens.int(), children.int(), first_child.int())


def on(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]


def test_no_more_children_are_listed_than_there_are_slots() -> None:
    levels, query, slots = some_levels(3), normal(4, 2, 4, 64), 20
    seen = [torch.zeros(2, dtype=torch.int64, device=device) for device in (DEVICE, torch.device("cpu"))]
    moved = on(DEVICE, query, levels.coarse, levels.tokens)
    found = on_cpu(open_clusters_triton(*moved, levels.of_coarse(DEVICE, slots, seen[0]), 40, 60, 0.125))
    children = levels.of_coarse(torch.device("cpu"), slots, seen[1])
    expected = open_clusters.reference(query, levels.coarse, levels.tokens, children, 40, 60, 0.125)
    assert int(expected.lengths.sum(-1).min()) > slots
    assert torch.equal(found.lengths, expected.lengths)
    assert found.used.tolist() == expected.used.tolist() == seen[0].tolist() == seen[1].tolist() == [slots, slots]
    for rows, lengths, first in zip(found.rows[:, :slots], found.lengths, levels.first_child, strict=True):
        members, _ = expand_runs(first, lengths, int(lengths.sum()))
        assert len({*rows.tolist()} & {*members.tolist()}) == slots


def opened(levels: Levels, query: torch.Tensor, wanted: int, budget: int) -> ClusterChoice:
    """Clusters that the kernels open, back on the CPU."""
    moved = on(DEVICE, query, levels.coarse, levels.tokens)
    seen, slots = torch.tensor([7, 0], device=DEVICE), levels.centroids.shape[1]
    with poisoned_memory():
        children = levels.of_coarse(DEVICE, slots, seen)
        found = on_cpu(open_clusters_triton(*moved, children, wanted, budget, query.shape[2] ** -0.5))
    assert torch.equal(seen.cpu(), found.used + torch.tensor([7, 0]))
    return found


def on_cpu(found: ClusterChoice) -> ClusterChoice:
    """A choice cut to its clusters; its queue must be zero."""
    assert found.queue is not None
    assert not found.queue.any()
    clusters = found.lengths.shape[1]
    cut = found.logits[..., :clusters].cpu(), found.lengths.cpu(), found.log_left[..., :clusters].cpu()
    return ClusterChoice(*cut, found.rows.cpu(), found.used.cpu())


def listed(
    levels: Levels, query: torch.Tensor, some: tuple[torch.Tensor, torch.Tensor], budget: int,
    softcap: float | None = None,
) -> ListedChoice:  # fmt: skip
    """Choice of the kernels among listed clusters, back on the CPU."""
    tensors = on(DEVICE, query, levels.centroids, levels.counts, levels.first_row)
    clusters, used = on(DEVICE, *some)
    with poisoned_memory():
        found = choose_listed_triton(*tensors, (clusters, used), budget, query.shape[2] ** -0.5, softcap)
    return ListedChoice(on_cpu(found.chosen), found.starts.cpu())


def members(levels: Levels, lengths: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Children [H, slots] of opened clusters and their number [H]; entries after these are invalid indices."""
    clusters, valid = expand_runs(levels.first_child, lengths, slots)
    return torch.where(valid, clusters, -(10**6)).int(), valid.sum(-1).int()


@pytest.mark.parametrize(
    ("parents", "wanted", "budget"),
    [(1, 1, 0), (30, 0, 0), (200, 0, 1), (200, 37, 20), (200, 20, 2000), (200, 10**6, 0), (30, 0, 10**6)],
)
def test_the_best_are_opened_until_there_is_enough(
    parents: int, wanted: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FEWEST_OPENED", "MOST"):
        monkeypatch.setattr(f"sparsekv.kernels.clusters.budget_choice_triton.{name}", 64)
    levels, query = some_levels(wanted % 7, parents=parents), normal(9, 2, 4, 64)
    found = opened(levels, query, wanted, budget)
    children = levels.of_coarse(query.device, levels.centroids.shape[1])
    expected = open_clusters.reference(query, levels.coarse, levels.tokens, children, wanted, budget, 0.125)
    assert torch.equal(found.lengths, expected.lengths)
    for one in (found, expected):
        clusters, used = members(levels, one.lengths, children.slots)
        assert torch.equal(one.used, used)
        for head, number in enumerate(used.tolist()):
            assert torch.equal(one.rows[head, :number].sort().values, clusters[head, :number])
    assert_close(found.log_left.exp(), expected.log_left.exp(), 1e-5)


def test_levels_in_buffers_with_room() -> None:
    """Tensors of clusters to which tokens are appended have spare capacity."""
    levels, query = some_levels(3), normal(9, 2, 4, 64)
    expected = opened(levels, query, 40, 60)
    roomy = Levels(*(with_room(getattr(levels, field.name)) for field in fields(levels)))
    moved, children = query.to(DEVICE), Children(roomy.children, roomy.first_child, levels.centroids.shape[1])
    found = open_clusters_triton(moved, roomy.coarse, roomy.tokens, children, 40, 60, 0.125)
    assert torch.equal(found.lengths.cpu(), expected.lengths)
    assert torch.equal(found.rows.cpu()[:, :40].sort(1).values, expected.rows[:, :40].sort(1).values)
    below = expected.rows.to(DEVICE), expected.used.to(DEVICE)
    chosen = choose_listed_triton(moved, roomy.centroids, roomy.counts, roomy.first_row, below, 60, 0.125)
    assert torch.equal(
        chosen.chosen.rows.cpu()[:, :60].sort(1).values,
        listed(levels, query, (expected.rows, expected.used), 60).chosen.rows[:, :60].sort(1).values,
    )


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 150), st.integers(0, 600))
@settings(max_examples=40)
def test_no_more_is_opened_than_is_needed(seed: int, parents: int, wanted: int, budget: int) -> None:
    """Tokens and children reach their targets if there are enough; without the worst opened cluster one would not."""
    levels, query = some_levels(seed, H=1, parents=parents, D=16), normal(seed + 2, 1, 2, 16)
    tokens, children = levels.tokens[0], levels.children[0]
    below = levels.of_coarse(query.device, levels.centroids.shape[1])
    found = open_clusters.reference(query, levels.coarse, levels.tokens, below, wanted, budget, 0.25)
    of_all = (tokens > 0) & (found.log_left[0] == -torch.inf)
    held, had = int(tokens[of_all].sum()), int(children[of_all].sum())
    assert torch.equal(found.lengths[0], children * of_all)
    assert held >= min(budget, int(tokens.sum()))
    assert had >= min(wanted, int(children.sum()))
    if of_all.any():
        smallest = tokens[of_all].max(), children[of_all].max()
        assert held - smallest[0] < budget or had - smallest[1] < wanted
    stands = found.log_left[0].exp().round().long()
    assert int(stands.sum()) + held == int(tokens.sum())


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 600))
@example(6, 6, 32)
@settings(max_examples=25)
def test_what_is_opened_is_the_best_to_a_power_of_two(seed: int, parents: int, budget: int) -> None:
    levels, query = some_levels(seed, H=1, parents=parents, D=16), 3 * normal(seed + 2, 1, 2, 16)
    below = levels.of_coarse(query.device, levels.centroids.shape[1])
    found = open_clusters.reference(query, levels.coarse, levels.tokens, below, 0, budget, 0.25)
    scores = cluster_scores(query[:, :, None], levels.coarse, levels.tokens, 0.25)[0, 0]
    is_left = found.log_left[0] > -torch.inf
    taken, left = scores[~is_left & (levels.tokens[0] > 0)], scores[is_left]
    # Scores below about 2 ** -14 / budget are not distinguished.
    told_apart = left > 2.0**-13 / max(budget, 1)
    assert not len(taken) or not bool(told_apart.any()) or left.max() <= 2 * taken.min() * 1.001


@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=lambda value: str(value))
def test_logits_of_listed_clusters(D: int, dtype: torch.dtype, tolerance: float) -> None:
    levels = some_levels(D, D=D)
    levels = Levels(levels.centroids.to(dtype), *(getattr(levels, name) for name in list(levels.__dict__)[1:]))
    query = normal(1, 2, 3, D).to(dtype)
    lengths = torch.randint(0, 2, levels.children.shape) * levels.children
    slots = int(lengths.sum(1).max()) + 50
    found = listed(levels, query, members(levels, lengths, slots), 50)
    clusters, valid = expand_runs(levels.first_child, lengths, slots)
    exact = torch.einsum("hgd,hcd->hgc", query.double(), levels.centroids.double()) * D**-0.5
    exact = exact.gather(2, clusters[:, None].expand(-1, 3, -1))
    assert bool((found.chosen.logits[~valid[:, None].expand_as(exact)] == -torch.inf).all())
    assert_close(found.chosen.logits.masked_fill(~valid[:, None], 0), exact.masked_fill(~valid[:, None], 0), tolerance)


@pytest.mark.parametrize(("slots", "part"), [(150, 512), (500, 128)])
@pytest.mark.parametrize(("budget", "softcap"), [(0, None), (60, None), (60, 2.0), (10**6, None)])
def test_the_best_of_listed_clusters(
    budget: int, softcap: float | None, slots: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one part in each head, or with many parts that share the few slots in use."""
    for name in ("FEWEST_LISTED", "MOST"):
        monkeypatch.setattr(f"sparsekv.kernels.clusters.budget_choice_triton.{name}", part)
    levels, query = some_levels(5, parents=60), normal(2, 2, 4, 64)
    below = levels.of_coarse(query.device, slots)
    choice = open_clusters.reference(query, levels.coarse, levels.tokens, below, 120, 0, 0.125)
    some = members(levels, choice.lengths, slots)
    found = listed(levels, query, some, budget, softcap)
    tensors = query, levels.centroids, levels.counts, levels.first_row
    expected = choose_listed.reference(*tensors, some, budget, 0.125, softcap)
    assert torch.equal(found.chosen.lengths, expected.chosen.lengths)
    assert torch.equal(found.starts, expected.starts)
    for head, used in enumerate(expected.chosen.lengths.sum(-1).tolist()):
        taken = [one.rows[head, :used].sort().values for one in (found.chosen, expected.chosen)]
        assert torch.equal(*taken)
        assert found.chosen.used[head] == expected.chosen.used[head] == used
    assert_close(found.chosen.log_left.exp(), expected.chosen.log_left.exp(), 1e-5)


def test_nothing_is_listed() -> None:
    levels, query = some_levels(6), normal(2, 2, 2, 64)
    found = listed(levels, query, members(levels, torch.zeros_like(levels.children), 16), 10)
    assert int(found.chosen.lengths.abs().max()) == 0
    assert found.chosen.used.tolist() == [0, 0]
    assert bool((found.chosen.logits == -torch.inf).all())
