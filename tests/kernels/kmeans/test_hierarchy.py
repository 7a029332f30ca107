"""A hierarchy of clusters: every token is in one cluster, and counts, numbers and means agree between levels."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import member_means, token_labels
from support.random_tensors import clustered, normal
from support.reference import assert_close

from sparsekv.indexing.indexers.cluster_indexer import kmeans
from sparsekv.kernels.kmeans.hierarchy import (
    Level,
    join_blocks,
    level_sizes,
    level_tensors,
    levels_above,
    number_neighbours,
)
from sparsekv.kernels.kmeans.kmeans import to_space

FIRST = 7


@dataclass(frozen=True)
class _Built:
    keys: torch.Tensor
    values: torch.Tensor
    tensors: dict[str, torch.Tensor]
    depth: int

    def level(self, number: int, name: str) -> torch.Tensor:
        return self.tensors[f"level{number}.{name}"]

    def labels(self, number: int) -> torch.Tensor:
        """Cluster [Hk, M] of each token at a level, according to the artifact's tensors."""
        return token_labels(self.tensors, number, FIRST)


def _levels(
    keys: torch.Tensor, sizes: list[int], *, space: str, iterations: int, seed: int
) -> tuple[list[Level], torch.Tensor]:
    def cluster(points: torch.Tensor, clusters: int, valid: torch.Tensor | None) -> torch.Tensor:
        return kmeans(to_space(points, space), clusters, iterations, seed, valid)

    labels = cluster(keys, sizes[0], None)
    return levels_above(keys, labels, sizes, cluster), labels


@st.composite
def _hierarchies(draw: st.DrawFn) -> _Built:
    """Hierarchies of keys with repetitions, so that clusters are uneven and some are empty."""
    heads, tokens, seed = draw(st.integers(1, 3)), draw(st.integers(12, 90)), draw(st.integers(0, 10**6))
    distinct = draw(st.integers(1, tokens))
    rows = torch.randint(distinct, (tokens,), generator=torch.Generator().manual_seed(seed))
    keys = clustered(seed, heads, distinct, 4, 5)[:, rows]
    finest = draw(st.integers(2, tokens))
    middle = draw(st.integers(1, finest))
    sizes = [finest, middle, draw(st.integers(1, middle))][: draw(st.integers(1, 3))]
    space = draw(st.sampled_from(["normalised", "raw", "centred"]))
    levels, labels = _levels(keys, sizes, space=space, iterations=3, seed=seed)
    labels = number_neighbours(levels, labels)
    values = normal(seed + 5, heads, tokens, 4)
    return _Built(keys, values, level_tensors(levels, labels, values, FIRST), len(sizes))


properties = settings(max_examples=25)


@properties
@given(built=_hierarchies())
def test_token_is_in_exactly_one_finest_cluster(built: _Built) -> None:
    order, offsets = built.tensors["token_order"], built.tensors["token_offsets"]
    tokens = built.keys.shape[1]
    assert torch.equal(order.long().sort(dim=1).values, (FIRST + torch.arange(tokens)).expand_as(order))
    assert bool((offsets.diff(dim=1) >= 0).all())
    assert bool((offsets[:, 0] == 0).all())
    assert bool((offsets[:, -1] == tokens).all())
    assert torch.equal(offsets.diff(dim=1), built.level(0, "counts"))


@properties
@given(built=_hierarchies())
def test_counts_are_of_tokens_at_every_level_and_sum_from_children_to_parents(built: _Built) -> None:
    for number in range(built.depth):
        counts = built.level(number, "counts").long()
        assert bool((counts.sum(1) == built.keys.shape[1]).all())
        if number:
            below = built.level(number - 1, "counts").long()
            sums = torch.zeros_like(counts).scatter_add_(1, built.level(number - 1, "parent").long(), below)
            assert torch.equal(counts, sums)


@properties
@given(built=_hierarchies())
def test_centroids_of_every_level_are_the_means_of_its_member_keys_and_values(built: _Built) -> None:
    for number in range(built.depth):
        labels, counts = built.labels(number), built.level(number, "counts").long()
        assert torch.equal(torch.zeros_like(counts).scatter_add_(1, labels, torch.ones_like(labels)), counts)
        for name, rows in (("centroids", built.keys), ("value_centroids", built.values)):
            centroids = built.level(number, name)
            of_token = centroids.gather(1, labels[..., None].expand_as(rows))
            assert_close(of_token, member_means(rows, labels), 1e-5)
            assert not centroids[counts == 0].any()


@properties
@given(built=_hierarchies())
def test_children_of_a_parent_are_neighbours_and_empty_clusters_come_last(built: _Built) -> None:
    for number in range(built.depth):
        filled = built.level(number, "counts") > 0
        assert bool((filled.int().diff(dim=1) <= 0).all())
        if number + 1 < built.depth:
            parent = built.level(number, "parent")
            assert bool((parent.diff(dim=1) >= 0).all())


def test_tokens_of_a_cluster_keep_their_order() -> None:
    keys = clustered(0, 2, 60, 4, 5)
    levels, labels = _levels(keys, [8, 3], space="normalised", iterations=5, seed=0)
    built = level_tensors(levels, number_neighbours(levels, labels), keys, 0)
    inside = torch.ones(2, 59, dtype=torch.bool)
    inside.scatter_(1, (built["token_offsets"][:, 1:-1].long() - 1).clamp(0, 58), False)
    assert bool((built["token_order"].diff(dim=1) > 0)[inside].all())


def test_an_empty_cluster_never_reaches_the_next_level() -> None:
    """Three different keys, near each other and far from 0, fill three of ten clusters, and three at the next level."""
    kinds = torch.tensor([[1.0, 0.0], [1.0, 0.2], [1.0, -0.2]])
    levels, _ = _levels(kinds[None, torch.arange(30) % 3], [10, 5], space="raw", iterations=5, seed=0)
    assert int((levels[0].counts > 0).sum()) == 3
    assert levels[1].counts.tolist() == [[10, 10, 10]]


def test_numbering_puts_the_children_of_an_empty_parent_last() -> None:
    fine = Level(torch.arange(4.0).view(1, 4, 1), torch.tensor([[2.0, 0.0, 1.0, 3.0]]), torch.tensor([[2, 0, 0, 2]]))
    coarse = Level(torch.arange(3.0).view(1, 3, 1), torch.tensor([[1.0, 0.0, 5.0]]))
    labels = number_neighbours([fine, coarse], torch.tensor([[0, 0, 2, 3, 3, 3]]))
    assert coarse.counts.tolist() == [[1, 5, 0]]
    assert fine.counts.tolist() == [[1, 2, 3, 0]]
    assert fine.parent is not None
    assert fine.parent.tolist() == [[0, 1, 1, 2]]
    assert labels.tolist() == [[1, 1, 0, 2, 2, 2]]
    assert fine.centroids[0, :, 0].tolist() == [2, 0, 3, 1]


def _block(seed: int, tokens: int, first: int, sizes: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Values and tensors of a block; keys repeat, so that some clusters are empty."""
    keys = clustered(seed, 2, tokens, 4, 5)[:, torch.arange(tokens) // 2]
    values = normal(seed + 5, 2, tokens, 4)
    levels, labels = _levels(keys, sizes, space="normalised", iterations=3, seed=seed)
    return values, level_tensors(levels, number_neighbours(levels, labels), values, first)


@st.composite
def _blocks(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]], int]:
    """Values and tensors of one to four neighbouring blocks, and their number of levels, one to three."""
    depth, lengths = draw(st.integers(1, 3)), draw(st.lists(st.integers(6, 40), min_size=1, max_size=4))
    first, built = FIRST, []
    for length in lengths:
        finest = draw(st.integers(2, length))
        sizes = [finest, max(1, finest // 2), max(1, finest // 4)][:depth]
        built.append(_block(draw(st.integers(0, 10**6)), length, first, sizes))
        first += length
    values, tensors = zip(*built, strict=True)
    return list(values), list(tensors), depth


@properties
@given(built=_blocks())
def test_joined_blocks_hold_what_each_held_and_keep_to_themselves(
    built: tuple[list[torch.Tensor], list[dict[str, torch.Tensor]], int],
) -> None:
    values, blocks, depth = built
    joined, tokens = join_blocks(blocks), sum(rows.shape[1] for rows in values)
    assert torch.equal(joined["token_order"].long().sort(1).values, (FIRST + torch.arange(tokens)).expand(2, -1))
    assert torch.equal(joined["token_offsets"].diff(dim=1), joined["level0.counts"])
    for level in range(depth):
        labels = token_labels(joined, level, FIRST)
        expected, clusters, first = [], 0, FIRST
        for rows, block in zip(values, blocks, strict=True):
            expected.append(token_labels(block, level, first) + clusters)
            clusters += block[f"level{level}.counts"].shape[1]
            first += rows.shape[1]
        assert torch.equal(labels, torch.cat(expected, 1))
        of_token = joined[f"level{level}.value_centroids"].gather(1, labels[..., None].expand(-1, -1, 4))
        assert_close(of_token, member_means(torch.cat(values, 1), labels), 1e-5)
        if level + 1 < depth:
            assert bool((joined[f"level{level}.parent"].diff(dim=1) >= 0).all())


@properties
@given(built=_blocks())
def test_block_clusters_say_where_each_blocks_tokens_are(
    built: tuple[list[torch.Tensor], list[dict[str, torch.Tensor]], int],
) -> None:
    values, blocks, _ = built
    joined, first = join_blocks(blocks), FIRST
    assert joined["block_clusters"].dtype == torch.int32
    for number, rows in enumerate(values):
        for head in range(2):
            start, end = joined["block_clusters"][head, number : number + 2].tolist()
            inside = slice(*joined["token_offsets"][head, [start, end]].tolist())
            tokens = joined["token_order"][head, inside].sort().values
            assert torch.equal(tokens, torch.arange(first, first + rows.shape[1], dtype=torch.int32))
        first += rows.shape[1]


@pytest.mark.parametrize(
    ("shares", "tokens", "sizes"),
    [((0.0625,), 8192, [512]), ((0.125, 1 / 64), 2048, [256, 32]), ((0.05, 0.01), 30, [2, 1])],
)
def test_sizes_of_levels_are_shares_of_the_tokens_and_one_at_least(
    shares: tuple[float, ...], tokens: int, sizes: list[int]
) -> None:
    assert level_sizes(shares, tokens) == sizes
