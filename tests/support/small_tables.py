"""A layer of random keys with posting lists of random queries, ready to select from, without a model."""

from dataclasses import dataclass

import torch

from sparsekv.formats.index.schema import LayerFacts, RopeFacts, Split
from sparsekv.indexing.indexers.interface import BuiltLayer, LayerInput
from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.kernels.posting_lists.posting_lists import Tables
from sparsekv.runtime.selection.interface import MiddleContext

from .random_tensors import normal
from .small_layer import SINKS, TAIL, SmallLayer

HALVES = RopeFacts(frequencies=[0.5] * 4, interleaved=False)
SMALL = CSAttentionIndexer(subspace_size=4, centroids=6, alpha=0.3, query_sample=64)


@dataclass(frozen=True)
class TabledLayer:
    """An indexer's input for a layer, the tensors that the indexer built, and the layer as a method sees it."""

    given: LayerInput
    tensors: dict[str, torch.Tensor]
    layer: SmallLayer

    @property
    def tables(self) -> Tables:
        return Tables.from_tensors(self.tensors, self.given.split.middle, SINKS)


def layer_input(
    seed: int = 0, *, middle: int = 60, Hk: int = 2, G: int = 2, D: int = 16, positions: int = 32
) -> LayerInput:
    """Return keys and values [Hk, M, D], and a sample of queries [Hk G, P, D]; RoPE rotates half of the channels."""
    split = Split(sinks=SINKS, middle=middle, tail=TAIL)
    facts = LayerFacts(softmax_scale=0.3, softcap=None, sliding_window=None, attention_sinks=False, rope=HALVES)
    keys, values = normal(seed, 2, Hk, middle, D)
    return LayerInput(keys, values, facts, split, normal(seed + 1, Hk * G, positions, D))


def tabled_layer(
    seed: int = 0, indexer: CSAttentionIndexer = SMALL, given: LayerInput | None = None, queries: int = 8
) -> TabledLayer:
    """Return a layer with posting lists, random sinks and tail, and `queries` queries for each head."""
    given = layer_input(seed) if given is None else given
    assert given.queries is not None
    Hk, _, D = given.keys.shape
    tensors = indexer.build_layer(given)
    around = normal(seed + 2, 2, Hk, SINKS + TAIL, D)
    keys, values = (
        torch.cat([rows[:, :SINKS], inside, rows[:, SINKS:]], 1)
        for rows, inside in zip(around, (given.keys, given.values), strict=True)
    )
    asked = normal(seed + 3, len(given.queries), queries, D)
    calibration = indexer.calibrate(lambda: iter([BuiltLayer(tensors, asked, given.facts)]))
    context = MiddleContext(
        lambda: given.keys,
        lambda: given.values,
        lambda: asked.unflatten(0, (Hk, -1)),
        given.facts,
        tensors,
        calibration,
        first_token=SINKS,
    )
    return TabledLayer(given, tensors, SmallLayer(keys, values, asked.unflatten(0, (Hk, -1)), given.split, context))
