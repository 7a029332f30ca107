"""Clusters of keys with RoPE undone: what is clustered, what the index holds, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import member_means, token_labels
from support.random_tensors import clustered, normal
from support.reference import assert_close
from support.rotation import ROPES, rotated, rotated_kinds

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import LayerFacts, RopeFacts, Split
from sparsekv.indexing.indexers.interface import LayerInput, choose_indexers
from sparsekv.indexing.methods.multipole import MultipoleIndexer, WindowedMultipoleIndexer

SINKS = 3
LEVELS = {1: (0.2,), 2: (0.25, 0.06), 3: (0.4, 0.2, 0.05)}
every_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)


def _input(keys: torch.Tensor, rope: RopeFacts | None) -> LayerInput:
    facts = LayerFacts(softmax_scale=0.3, softcap=None, sliding_window=None, attention_sinks=False, rope=rope)
    tokens = keys.shape[1]
    return LayerInput(keys, normal(5, *keys.shape), facts, Split(sinks=SINKS, middle=tokens, tail=8))


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(40, 200),
    depth=st.sampled_from(sorted(LEVELS)),
    rope=st.sampled_from(list(ROPES.values())),
    space=st.sampled_from(["normalised", "raw", "centred"]),
)
def test_each_centroid_is_the_mean_of_its_own_kind_of_rows(
    seed: int, tokens: int, depth: int, rope: RopeFacts, space: str
) -> None:
    layer = _input(clustered(seed, 2, tokens, 8, 12), rope)
    built = WindowedMultipoleIndexer(levels=LEVELS[depth], block=48, iterations=2, space=space).build_layer(layer)
    undone = rotated(layer.keys, -SINKS - torch.arange(tokens), rope)
    for level in range(depth):
        labels = token_labels(built, level, SINKS)
        rows = {"centroids": layer.keys, "value_centroids": layer.values, "lookup_centroids": undone}
        for name, of_tokens in rows.items():
            of_token = built[f"level{level}.{name}"].gather(1, labels[..., None].expand_as(layer.keys))
            assert_close(of_token, member_means(of_tokens, labels), 1e-5)


@every_rope
def test_clusters_are_those_of_keys_that_never_turned(rope: RopeFacts) -> None:
    """The same numbers and counts as for the plain keys, whose centroids are what clusters are looked up by."""
    plain = clustered(1, 2, 150, 8, 12)
    keys = rotated(plain, SINKS + torch.arange(150), rope).float()
    indexer = MultipoleIndexer(levels=LEVELS[2], block=64)
    windowed = WindowedMultipoleIndexer(levels=LEVELS[2], block=64).build_layer(_input(keys, rope))
    expected = indexer.build_layer(_input(plain, None))
    for name, tensor in expected.items():
        if name.endswith(".centroids"):
            assert_close(windowed[name.replace(".", ".lookup_")], tensor, 1e-4)
        elif not tensor.is_floating_point():
            assert torch.equal(windowed[name], tensor), name
    if rope.frequencies:
        assert not torch.equal(indexer.build_layer(_input(keys, rope))["token_order"], expected["token_order"])


@every_rope
def test_a_key_that_comes_again_and_again_is_alike_wherever_it_stands(rope: RopeFacts) -> None:
    labels = torch.arange(120).expand(2, -1) % 4
    layer = _input(rotated_kinds(2, labels, 8, SINKS, rope), rope)
    built = WindowedMultipoleIndexer(levels=(0.2,), block=256).build_layer(layer)
    found = token_labels(built, 0, SINKS)
    for head in range(2):
        pairs = set(zip(found[head].tolist(), labels[head].tolist(), strict=True))
        assert len({cluster for cluster, _ in pairs}) == len(pairs) < 120


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_holds_what_multipole_does_and_centroids_for_the_lookup(dtype: torch.dtype) -> None:
    layer = _input(clustered(3, 2, 200, 8, 12), ROPES["halves"])
    layer = replace(layer, keys=layer.keys.to(dtype), values=layer.values.to(dtype))
    parameters = {"levels": (0.125, 1 / 32), "block": 64}
    plain, windowed = (
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in indexer.build_layer(layer).items()}
        for indexer in (MultipoleIndexer(**parameters), WindowedMultipoleIndexer(**parameters))
    )
    lookups = {f"level{level}.lookup_centroids": ((2, size, 8), dtype) for level, size in ((0, 25), (1, 6))}
    assert windowed == plain | lookups


def test_a_layer_that_is_not_known_to_turn_is_refused() -> None:
    layer = _input(clustered(4, 2, 60, 8, 12), None)
    with pytest.raises(UsageError, match=r"how each layer rotates its keys.*build it again with --force"):
        WindowedMultipoleIndexer().build_layer(layer)
    assert MultipoleIndexer().build_layer(layer)


def test_it_is_built_where_it_is_asked_for_alone() -> None:
    assert "multipole-windowed" not in choose_indexers([])
    assert "multipole-windowed" in choose_indexers(["all"])
    assert choose_indexers(["multipole-windowed"]) == ["multipole-windowed"]
