"""The multipole indexer: every block clustered by itself, with centroids that are means at every level."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import member_means, token_labels
from support.random_tensors import clustered, normal
from support.reference import assert_close

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import LayerFacts, Split
from sparsekv.indexing.indexers.interface import LayerInput, choose_indexers, indexers
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.kernels.kmeans.hierarchy import block_offsets

SINKS = 3
FACTS = LayerFacts(softmax_scale=0.3, softcap=None, sliding_window=None, attention_sinks=False)
LEVELS = {1: (0.2,), 2: (0.25, 0.06), 3: (0.4, 0.2, 0.05)}
properties = settings(max_examples=15)
depths = st.sampled_from(sorted(LEVELS))
outlying = st.sampled_from([0.0, 0.1])


def _input(seed: int, tokens: int, dtype: torch.dtype = torch.float32) -> LayerInput:
    split = Split(sinks=SINKS, middle=tokens, tail=8)
    keys, values = clustered(seed, 2, tokens, 8, 12), normal(seed + 5, 2, tokens, 8)
    return LayerInput(keys.to(dtype), values.to(dtype), FACTS, split)


@properties
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(16, 260),
    block=st.integers(16, 90),
    depth=depths,
    outliers=outlying,
)
def test_a_blocks_clusters_hold_its_own_tokens_each_of_them_once(
    seed: int, tokens: int, block: int, depth: int, outliers: float
) -> None:
    indexer = MultipoleIndexer(levels=LEVELS[depth], outliers=outliers, block=block, iterations=2)
    built = indexer.build_layer(_input(seed, tokens))
    offsets = built["block_offsets"].tolist()
    assert offsets == block_offsets(tokens, block)
    everything = SINKS + torch.arange(tokens)
    assert torch.equal(built["token_order"].long().sort(1).values, everything.expand(2, -1))
    of_block = torch.repeat_interleave(torch.arange(len(offsets) - 1), torch.tensor(offsets).diff()).expand(2, -1)
    for level in range(depth):
        labels = token_labels(built, level, SINKS)
        counts = built[f"level{level}.counts"].long()
        assert torch.equal(torch.zeros_like(counts).scatter_add_(1, labels, torch.ones_like(labels)), counts)
        for head in range(2):
            pairs = set(zip(labels[head].tolist(), of_block[head].tolist(), strict=True))
            assert len(pairs) == len({cluster for cluster, _ in pairs})
        if level + 1 < depth:
            parent = built[f"level{level}.parent"]
            assert bool((parent.diff(dim=1) >= 0).all())
    first = built["block_clusters"].long()
    labels = token_labels(built, 0, SINKS)
    assert bool((labels >= first.gather(1, of_block)).all())
    assert bool((labels < first.gather(1, of_block + 1)).all())
    assert torch.equal(first[:, -1], torch.full((2,), built["level0.counts"].shape[1]))


@pytest.mark.thinned
@pytest.mark.parametrize("different", [80, 10, 4, 1])
@pytest.mark.parametrize("depth", sorted(LEVELS))
@pytest.mark.parametrize("space", ["normalised", "centred"])
def test_blocks_are_clustered_together_as_each_by_itself(
    monkeypatch: pytest.MonkeyPatch, depth: int, space: str, different: int
) -> None:
    """As on a GPU; also where one of them has few different keys, and so fewer clusters."""
    layer, built = _input(3, 420), []
    layer.keys[:, 160:240] = layer.keys[:, 160 : 160 + different].repeat(1, 80 // different, 1)
    indexer = MultipoleIndexer(levels=LEVELS[depth], space=space, block=80, iterations=3)
    for together in (80, 400):
        monkeypatch.setattr(MultipoleIndexer, "_together", lambda self, keys, most=together: most)
        built.append(indexer.build_layer(layer))
    assert built[0].keys() == built[1].keys()
    for name, tensor in built[0].items():
        assert torch.equal(tensor, built[1][name]), name


@properties
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(40, 200),
    depth=depths,
    space=st.sampled_from(["normalised", "raw", "centred"]),
    outliers=outlying,
)
def test_centroids_are_the_means_of_their_tokens_keys_and_values(
    seed: int, tokens: int, depth: int, space: str, outliers: float
) -> None:
    layer = _input(seed, tokens)
    indexer = MultipoleIndexer(levels=LEVELS[depth], outliers=outliers, block=48, iterations=2, space=space)
    built = indexer.build_layer(layer)
    for level in range(depth):
        labels = token_labels(built, level, SINKS)
        for name, rows in (("centroids", layer.keys), ("value_centroids", layer.values)):
            of_token = built[f"level{level}.{name}"].gather(1, labels[..., None].expand_as(rows))
            assert_close(of_token, member_means(rows, labels), 1e-5)


@pytest.mark.parametrize("depth", LEVELS)
def test_a_closed_block_stays_as_it_is_when_more_tokens_come(depth: int) -> None:
    """A block is clustered by itself, so that what comes after it changes nothing in it."""
    indexer = MultipoleIndexer(levels=LEVELS[depth], block=32)
    layer = _input(1, 150)
    shorter = LayerInput(layer.keys[:, :90], layer.values[:, :90], FACTS, layer.split)
    one, two = (indexer.build_layer(whole) for whole in (shorter, layer))
    assert one["block_offsets"].tolist() == [0, 32, 64, 90]
    clusters = one["block_clusters"][0, 2].item()
    assert torch.equal(one["block_clusters"][:, :3], two["block_clusters"][:, :3])
    assert torch.equal(one["token_order"][:, :64], two["token_order"][:, :64])
    for name in ("level0.centroids", "level0.value_centroids", "level0.counts"):
        assert torch.equal(one[name][:, :clusters], two[name][:, :clusters])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_have_the_sizes_that_each_blocks_levels_ask_for(dtype: torch.dtype) -> None:
    """Blocks of 64, 64 and 72 tokens: 8 + 8 + 9 clusters, and 2 + 2 + 2 above them."""
    built = MultipoleIndexer(levels=(0.125, 1 / 32), block=64).build_layer(_input(2, 200, dtype))
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in built.items()}
    assert shapes == {
        "token_order": ((2, 200), torch.int32),
        "token_offsets": ((2, 26), torch.int32),
        "block_offsets": ((4,), torch.int32),
        "block_clusters": ((2, 4), torch.int32),
        "level0.centroids": ((2, 25, 8), dtype),
        "level0.value_centroids": ((2, 25, 8), dtype),
        "level0.counts": ((2, 25), torch.int32),
        "level0.parent": ((2, 25), torch.int32),
        "level1.centroids": ((2, 6, 8), dtype),
        "level1.value_centroids": ((2, 6, 8), dtype),
        "level1.counts": ((2, 6), torch.int32),
    }
    assert all(tensor.is_contiguous() for tensor in built.values())


def test_by_default_one_centroid_stands_for_16_tokens_in_blocks_of_8192() -> None:
    built = MultipoleIndexer(iterations=1).build_layer(_input(3, 12_300))
    assert [end - start for start, end in pairwise(built["block_offsets"].tolist())] == [8192, 4108]
    assert built["level0.counts"].shape == (2, 512 + 257)


def test_a_document_of_one_block_is_clustered_as_a_whole() -> None:
    built = MultipoleIndexer(levels=(1.0,), block=256).build_layer(_input(4, 100))
    assert built["block_offsets"].tolist() == [0, 100]
    assert bool((built["level0.counts"] == 1).all())


def test_every_parameter_changes_the_clusters() -> None:
    layer, indexer = _input(5, 300), MultipoleIndexer(levels=(0.1,), block=128)
    orders = [
        indexer.build_layer(layer)["token_order"],
        *(
            replace(indexer, **{name: value}).build_layer(layer)["token_order"]
            for name, value in (
                ("seed", 1),
                ("space", "raw"),
                ("iterations", 1),
                ("block", 64),
                ("levels", (0.2,)),
                ("outliers", 0.1),
            )
        ),
    ]
    assert all(not torch.equal(orders[0], other) for other in orders[1:])
    assert torch.equal(orders[0], indexer.build_layer(layer)["token_order"])


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"block": 15}, "--block 15"),
        ({"block": 0}, "--block 0"),
        ({"levels": (0.01, 0.1)}, "--levels"),
        ({"iterations": 0}, "--iterations 0"),
        ({"outliers": 1.5}, "--outliers 1.5"),
        ({"space": "outer"}, "--space outer"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        MultipoleIndexer(**parameters)


def test_it_is_registered() -> None:
    assert indexers()["multipole"] is MultipoleIndexer
    assert choose_indexers(["multipole"]) == ["multipole"]
