"""Lookup of children: the scores of a flat lookup, normalised over the children of opened clusters alone."""

import pytest
import torch
from support.reference import assert_close, random_attention

from sparsekv.kernels.clusters.cluster_choice import Tree, child_scores, tree_from_tensors
from sparsekv.kernels.common.row_operations import expand_runs
from sparsekv.kernels.scores.logits import cluster_scores

FINE, COARSE, SCALE = 30, 7, 0.125


def random_tree(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Tree]:
    """A query [2, 3, 4, 64] and two levels; the last coarse cluster is empty, and parent of the empty fine ones."""
    query, centroids, coarse = random_attention(T=FINE, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(1, 300, (2, FINE), generator=generator, dtype=torch.int32)
    counts[:, -4:] = 0
    parent = torch.randint(0, COARSE - 1, (2, FINE), generator=generator, dtype=torch.int32).sort(1).values
    parent[:, -4:] = COARSE - 1
    tokens = torch.zeros(2, COARSE, dtype=torch.int32).scatter_add_(1, parent.long(), counts)
    return query, tree_from_tensors(
        {
            "level0.centroids": centroids,
            "level0.counts": counts,
            "level0.parent": parent,
            "level1.centroids": coarse[:, :COARSE],
            "level1.counts": tokens,
            "token_order": torch.zeros(2, 1),
        }
    )


def children_of(tree: Tree, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of the children of `parents` [2, Q or 1, R]."""
    return tuple(  # type: ignore[return-value]
        values[0][:, None].expand(-1, parents.shape[1], -1).gather(2, parents)
        for values in (tree.first_child, tree.children)
    )


def random_parents(rows: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.stack([torch.randperm(COARSE, generator=generator)[:number] for _ in range(2 * rows)]).view(
        2, rows, -1
    )


def test_every_cluster_is_a_child_of_its_parent_once() -> None:
    _, tree = random_tree()
    everything, valid = expand_runs(tree.first_child[0], tree.children[0], FINE)
    assert valid.all()
    assert torch.equal(everything, torch.arange(FINE).expand(2, FINE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("rows", [1, 4], ids=["shared", "each query its own"])
def test_with_everything_opened_scores_are_those_of_a_flat_lookup(
    rows: int, softcap: float | None, dtype: torch.dtype
) -> None:
    query, tree = random_tree(dtype)
    runs = children_of(tree, random_parents(rows, COARSE))
    scores, clusters, counts = child_scores(query, tree, 0, *runs, FINE, SCALE, softcap)
    assert torch.equal(clusters.sort(-1).values, torch.arange(FINE).expand(2, rows, FINE))
    flat = cluster_scores(query, tree.centroids[0], tree.counts[0], SCALE, softcap)
    assert_close(scores, flat.gather(2, clusters.expand(2, 4, FINE)), 1e-6)
    assert torch.equal(counts, tree.counts[0][:, None].expand_as(clusters).gather(2, clusters))


@pytest.mark.parametrize("rows", [1, 4], ids=["shared", "each query its own"])
def test_scores_are_normalised_over_what_was_opened_alone(rows: int) -> None:
    query, tree = random_tree()
    starts, lengths = children_of(tree, random_parents(rows, 3))
    scores, clusters, counts = child_scores(query, tree, 0, starts, lengths, FINE, SCALE)
    used = torch.arange(FINE) < lengths.sum(-1, keepdim=True)
    opened = torch.zeros(2, rows, FINE, dtype=torch.int32).scatter_(2, clusters.masked_fill(~used, 0), 1)
    first_opened = (starts == 0).any(-1)
    opened[..., 0] = first_opened
    assert not counts[~used].any()
    assert not scores.masked_select(~used.expand_as(scores)).any()
    for row in range(rows):
        queries = slice(None) if rows == 1 else slice(row, row + 1)
        masked = tree.counts[0] * opened[:, row]
        flat = cluster_scores(query[:, :, queries], tree.centroids[0], masked, SCALE)
        expected = flat.gather(2, clusters[:, row, None].expand(-1, flat.shape[1], -1)) * used[:, row, None]
        assert_close(scores[:, queries], expected, 1e-6)


def test_children_past_the_capacity_are_left_out() -> None:
    query, tree = random_tree()
    runs = children_of(tree, random_parents(1, COARSE))
    _, everything, _ = child_scores(query, tree, 0, *runs, FINE, SCALE)
    scores, clusters, counts = child_scores(query, tree, 0, *runs, 11, SCALE)
    assert torch.equal(clusters, everything[..., :11])
    assert_close((scores.double() * counts).sum(-1), torch.ones(2, 4), 1e-6)


def test_nothing_opened_scores_nothing() -> None:
    query, tree = random_tree()
    nothing = torch.zeros(2, 1, 1, dtype=torch.int64)
    scores, _, counts = child_scores(query, tree, 0, nothing, nothing, 5, SCALE)
    assert not scores.any()
    assert not counts.any()
