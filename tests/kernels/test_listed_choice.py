"""Choosing down two levels by kernels: children of clusters, and clusters among those of some runs."""

from dataclasses import dataclass

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory, uneven_counts
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.cluster_choice import (
    ClusterChoice,
    Family,
    ListedChoice,
    choose_clusters_reference,
    choose_listed_reference,
)
from sparsekv.kernels.cluster_choice_triton import choose_clusters_triton, choose_listed_triton
from sparsekv.kernels.runs import expand_runs

pytestmark = compiled_or_interpreted
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Levels:
    """Two levels of H heads: fine clusters with tokens, and coarse ones of 0 to 12 of them, numbered by parent.

    centroids [H, C, D], counts and first_row [H, C] of the fine ones, coarse [H, P, D], family and tokens [H, P].
    """

    centroids: torch.Tensor
    counts: torch.Tensor
    first_row: torch.Tensor
    coarse: torch.Tensor
    tokens: torch.Tensor
    family: Family


def some_levels(seed: int, *, H: int = 2, parents: int = 30, D: int = 64) -> Levels:
    generator = torch.Generator().manual_seed(seed)
    children = torch.randint(0, 13, (H, parents), generator=generator)
    children[:, 0] += children.sum(1).max() + 1 - children.sum(1)
    clusters = int(children.sum(1)[0])
    counts = uneven_counts(seed, H, clusters).clamp(min=1)
    parent = torch.stack([torch.arange(parents).repeat_interleave(row) for row in children])
    tokens = torch.zeros_like(children).scatter_add_(1, parent, counts.long())
    family = Family(children.int(), (children.cumsum(1) - children).int(), (counts.cumsum(1) - counts).int())
    coarse, fine = normal(seed, H, parents, D), normal(seed + 1, H, clusters, D)
    return Levels(2 * fine, counts, family.first_row, 2 * coarse, tokens.int(), family)


def on(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]


def opened(levels: Levels, query: torch.Tensor, children: int) -> ClusterChoice:
    """What the kernels open, back on the CPU."""
    parts = on(DEVICE, levels.family.children, levels.family.first_child, levels.family.first_row)
    moved = on(DEVICE, query, levels.coarse, levels.tokens)
    with poisoned_memory():
        found = choose_clusters_triton(*moved, children, query.shape[2] ** -0.5, None, Family(*parts))
    some = (found.logits, found.lengths, found.ends, found.log_left)
    return ClusterChoice(*(one.cpu()[..., : levels.tokens.shape[1]] for one in some))


def listed(
    levels: Levels, query: torch.Tensor, runs: tuple[torch.Tensor, torch.Tensor], slots: int, budget: int,
    softcap: float | None = None,
) -> ListedChoice:  # fmt: skip
    """What the kernels choose among the clusters of runs, back on the CPU."""
    tensors = on(DEVICE, query, levels.centroids, levels.counts, levels.first_row)
    starts, ends = on(DEVICE, *runs)
    with poisoned_memory():
        found = choose_listed_triton(*tensors, (starts, ends), slots, budget, query.shape[2] ** -0.5, softcap)
    chosen = found.chosen
    cut = [one.cpu()[..., :slots] for one in (chosen.logits, chosen.lengths, chosen.ends, chosen.log_left)]
    return ListedChoice(ClusterChoice(*cut), found.clusters.cpu()[:, :slots], found.starts.cpu())


@pytest.mark.parametrize("alone", [10**6, 0], ids=["one program a head", "several"])
@pytest.mark.parametrize("children", [0, 1, 37, 90, 10**6])
def test_children_are_taken_of_the_best_clusters(children: int, alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsekv.kernels.budget_choice_triton.MOST_ALONE", alone)
    levels, query = some_levels(children % 7, parents=400), normal(9, 2, 4, 64)
    found = opened(levels, query, children)
    expected = choose_clusters_reference(query, levels.coarse, levels.tokens, children, 0.125, None, levels.family)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.ends, expected.ends)
    assert_close(found.log_left.exp(), expected.log_left.exp(), 1e-5)


@pytest.mark.parametrize("children", [0, 5, 41, 10**6])
def test_what_a_cluster_stands_for_is_what_its_children_do_not(children: int) -> None:
    """Together they are all tokens, each once, also where a cluster is opened in part."""
    levels, query = some_levels(3), normal(4, 2, 3, 64)
    found = opened(levels, query, children)
    clusters, valid = expand_runs(levels.family.first_child, found.lengths, int(found.ends[:, -1].max()))
    below = (levels.counts.gather(1, clusters) * valid).sum(1)
    assert torch.equal(found.log_left.exp().round().long().sum(1) + below, levels.counts.sum(1))


@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=lambda value: str(value))
def test_logits_of_listed_clusters(D: int, dtype: torch.dtype, tolerance: float) -> None:
    levels = some_levels(D, D=D)
    levels = Levels(levels.centroids.to(dtype), *(getattr(levels, name) for name in list(levels.__dict__)[1:]))
    query = normal(1, 2, 3, D).to(dtype)
    lengths = torch.randint(0, 2, levels.family.children.shape) * levels.family.children
    runs, slots = (levels.family.first_child, lengths.cumsum(1).int()), int(lengths.sum(1).max()) + 5
    found = listed(levels, query, runs, slots, 50)
    clusters, valid = expand_runs(levels.family.first_child, lengths, slots)
    assert torch.equal(found.clusters, torch.where(valid, clusters, 0).int())
    exact = torch.einsum("hgd,hcd->hgc", query.double(), levels.centroids.double()) * D**-0.5
    exact = exact.gather(2, clusters[:, None].expand(-1, 3, -1))
    assert bool((found.chosen.logits[~valid[:, None].expand_as(exact)] == -torch.inf).all())
    assert_close(found.chosen.logits.masked_fill(~valid[:, None], 0), exact.masked_fill(~valid[:, None], 0), tolerance)


@pytest.mark.parametrize("most", [0, 10**6], ids=["found before", "by the programs that read them"])
@pytest.mark.parametrize("budget", [0, 1, 60, 10**6])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_best_of_listed_clusters(
    softcap: float | None, budget: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsekv.kernels.cluster_choice_triton.MOST_OWN_ROWS", most)
    levels, query = some_levels(5, parents=60), normal(2, 2, 4, 64)
    choice = choose_clusters_reference(query, levels.coarse, levels.tokens, 120, 0.125, None, levels.family)
    runs = levels.family.first_child, choice.ends
    found = listed(levels, query, runs, 120, budget, softcap)
    tensors = query, levels.centroids, levels.counts, levels.first_row
    expected = choose_listed_reference(*tensors, runs, 120, budget, 0.125, softcap)
    for name in ("lengths", "ends"):
        assert torch.equal(getattr(found.chosen, name), getattr(expected.chosen, name))
    assert torch.equal(found.starts, expected.starts)
    assert_close(found.chosen.log_left.exp(), expected.chosen.log_left.exp(), 1e-5)


def test_nothing_is_listed() -> None:
    levels, query = some_levels(6), normal(2, 2, 2, 64)
    runs = levels.family.first_child, torch.zeros_like(levels.family.children)
    found = listed(levels, query, runs, 16, 10)
    assert int(found.chosen.ends.abs().max()) == 0
    assert bool((found.chosen.logits == -torch.inf).all())
