"""A block that grows: the same cuts however its tokens came, every token in one cluster, and means that are means."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import clustered, normal
from support.reference import assert_close
from support.rotation import rotated

from sparsekv.formats.index.schema import LayerFacts, RopeFacts, Split
from sparsekv.indexing.indexers.cluster_indexer import finest_labels, split_blocks
from sparsekv.indexing.indexers.interface import LARGEST_SEED, LayerInput
from sparsekv.indexing.methods.multipole import MultipoleIndexer, WindowedMultipoleIndexer
from sparsekv.kernels.kmeans.hierarchy import block_offsets, join_blocks
from sparsekv.kernels.kmeans.kmeans import cluster_means

SINKS = 3
ROPE = RopeFacts(frequencies=[0.6, 0.03], interleaved=False)
FACTS = LayerFacts(softmax_scale=1.0, softcap=None, sliding_window=None, attention_sinks=False, rope=ROPE)
Tensors = dict[str, torch.Tensor]


def _layer(tokens: int, seed: int) -> LayerInput:
    split = Split(sinks=SINKS, middle=tokens, tail=8)
    return LayerInput(clustered(seed, 2, tokens, 4, 6), normal(seed + 9, 2, tokens, 4), FACTS, split)


def _first(layer: LayerInput, tokens: int) -> LayerInput:
    split = layer.split.model_copy(update={"middle": tokens})
    return LayerInput(layer.keys[:, :tokens], layer.values[:, :tokens], FACTS, split)


def _assert_consistent(tensors: Tensors, layer: LayerInput, indexer: MultipoleIndexer) -> None:
    """Every invariant of an index of blocks, level by level, from its tensors alone."""
    tokens = layer.split.middle
    order, offsets = tensors["token_order"] - SINKS, tensors["token_offsets"]
    assert tensors["block_offsets"].tolist() == block_offsets(tokens, indexer.block)
    assert torch.equal(order.sort(dim=1).values, torch.arange(tokens).expand(2, -1).int())
    assert torch.equal(offsets.diff(dim=1), tensors["level0.counts"])
    assert torch.equal(offsets[:, -1], torch.tensor([tokens] * 2))
    rows = torch.arange(tokens).expand(2, -1).contiguous()
    of_row = torch.searchsorted(offsets[:, 1:].contiguous(), rows, right=True)
    labels = torch.empty_like(of_row).scatter_(1, order.long(), of_row)
    for start, stop, clusters in zip(
        *zip(*pairwise(tensors["block_offsets"].tolist()), strict=True),
        pairwise(tensors["block_clusters"][0].tolist()),
        strict=True,
    ):
        assert int(labels[:, start:stop].min()) >= clusters[0]
        assert int(labels[:, start:stop].max()) < clusters[1]
    sources = {"centroids": layer.keys, "value_centroids": layer.values}
    if isinstance(indexer, WindowedMultipoleIndexer):
        sources["lookup_centroids"] = rotated(layer.keys, -SINKS - torch.arange(tokens), ROPE)
    assert sources.keys() == {name.partition(".")[2] for name in tensors if name.endswith("centroids")}
    for level in range(len(indexer.levels)):
        clusters = tensors[f"level{level}.counts"].shape[1]
        for name, source in sources.items():
            means, counts = cluster_means(source, labels, clusters)
            # Angles are float32: of 1,000 radians that leaves 1e-5 of a rotated row.
            assert_close(tensors[f"level{level}.{name}"], means, 1e-4 if name == "lookup_centroids" else 1e-5)
            assert torch.equal(tensors[f"level{level}.counts"], counts.int())
        if level + 1 < len(indexer.levels):
            labels = tensors[f"level{level}.parent"].long().gather(1, labels)


def _assert_closed_blocks_stay(before: Tensors, after: Tensors) -> None:
    closed = len(before["block_offsets"]) - 2
    for old, new in zip(split_blocks(before)[:closed], split_blocks(after)[:closed], strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)


indexers = st.builds(
    lambda kind, **parameters: kind(**parameters),
    st.sampled_from([MultipoleIndexer, WindowedMultipoleIndexer]),
    levels=st.sampled_from([(0.0625,), (0.25, 0.05), (0.5, 0.2, 0.05), (1.0,)]),
    outliers=st.sampled_from([0.0, 0.1]),
    block=st.sampled_from([16, 23, 250]),
    iterations=st.just(2),
    space=st.sampled_from(["normalised", "raw", "centred"]),
    seed=st.integers(0, LARGEST_SEED),
)


@settings(max_examples=20)
@given(indexers, st.lists(st.integers(1, 300), min_size=2, max_size=4), st.integers(0, 10**6))
def test_any_split_of_appends_keeps_every_invariant(indexer: MultipoleIndexer, pieces: list[int], seed: int) -> None:
    layer = _layer(sum(pieces), seed)
    middle = pieces[0]
    tensors = indexer.build_layer(_first(layer, middle))
    for piece in pieces[1:]:
        part = _first(layer, middle + piece)
        grown = indexer.append_layer(tensors, part, middle)
        _assert_consistent(grown, part, indexer)
        _assert_closed_blocks_stay(tensors, grown)
        assert {name: tensor.dtype for name, tensor in grown.items()} == {n: t.dtype for n, t in tensors.items()}
        tensors, middle = grown, middle + piece
    assert grown.keys() == indexer.build_layer(layer).keys()


@settings(max_examples=20)
@given(indexers, st.integers(1, 600), st.integers(0, 10**6))
def test_blocks_taken_apart_join_to_what_they_were(indexer: MultipoleIndexer, tokens: int, seed: int) -> None:
    tensors = indexer.build_layer(_layer(tokens, seed))
    blocks = split_blocks(tensors)
    joined = join_blocks(blocks)
    assert joined.keys() == tensors.keys() - {"block_offsets"}
    assert all(torch.equal(joined[name], tensors[name]) for name in joined)
    for block in blocks:
        labels = finest_labels(block)
        counts = torch.zeros_like(block["level0.counts"]).scatter_add_(1, labels, torch.ones_like(labels).int())
        assert torch.equal(counts, block["level0.counts"])
