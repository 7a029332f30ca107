"""Centroids that are stored in 8 bits: kernels of a flat lookup read the numbers, all else what they mean."""

from dataclasses import replace

import pytest
import torch
from support.reference import assert_close
from support.small_layer import small_layer

from sparsekv.formats.index.context_rows import with_centroids_in_8_bits
from sparsekv.runtime.cache.kv_store import read_centroids
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.clusters.selector import ClusterSelector
from sparsekv.runtime.selection.interface import Method, MiddleContext


def stored_context(block: int | None) -> MiddleContext:
    context = small_layer(3, levels=(0.1, 0.02), block=block).context
    tensors, in_8_bits = read_centroids(with_centroids_in_8_bits(context.tensors), torch.float32)
    assert in_8_bits is not None
    return replace(context, tensors=tensors, centroids_in_8_bits=in_8_bits)


@pytest.mark.parametrize(
    ("method", "block"),
    [(Squeezed(), None), (Multipole(), 64), (Multipole("hierarchical"), 64), (Multipole(stream=True, buffer=8), 64)],
    ids=["squeezed", "multipole", "two levels", "stream"],
)
def test_every_lookup_reads_what_is_stored(method: Method, block: int | None) -> None:
    context = stored_context(block)
    selector = method.prepare(context)
    assert isinstance(selector, ClusterSelector)
    kept = selector.keys[0][:, : context.tensors["level0.centroids"].shape[1]]
    assert torch.equal(kept, context.tensors["level0.centroids"])
    assert selector.kernels.rows_in_8_bits == 0  # there is no GPU whose kernels would read the numbers


def test_what_kernels_read_in_8_bits_chooses_as_the_restored_centroids_do() -> None:
    context, layer = stored_context(64), small_layer(3, levels=(0.1, 0.02), block=64)
    selector = Multipole().prepare(context)
    assert isinstance(selector, ClusterSelector)
    query = layer.queries[:, :, :1]
    restored = selector.steps.flat(query, 60)
    numbers = replace(selector.steps, in_8_bits=context.centroids_in_8_bits)
    read = numbers.flat(query, 60)
    assert torch.equal(read.rows.lengths, restored.rows.lengths)
    assert read.rest is not None
    (left,) = read.rest.segments()
    assert left.scored is not None
    assert left.scored.values.dtype == torch.int8
    assert_close(left.scored.gathered(), selector.values[0], 1e-6)
