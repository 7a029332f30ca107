"""Centroids of an index in 8 bits: rounded likewise, the same wherever they are read."""

from dataclasses import replace

import pytest
import torch
from support.random_tensors import normal
from support.reference import assert_close
from support.small_layer import small_layer

from sparsekv.formats.int8_rows import quantise
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.clusters.selector import ClusterSelector
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.rounding import round_centroids


def prepared(method: Method, layer_block: int | None, *, in_8_bits: bool) -> ClusterSelector:
    layer = small_layer(3, levels=(0.1, 0.02), block=layer_block)
    selector = method.prepare(replace(layer.context, in_8_bits=in_8_bits))
    assert isinstance(selector, ClusterSelector)
    return selector


@pytest.mark.parametrize(("method", "block"), [(Squeezed(), None), (Multipole(), 64)], ids=["squeezed", "multipole"])
def test_they_are_off_by_half_a_scale_at_most(method: Method, block: int | None) -> None:
    exact, rounded = (prepared(method, block, in_8_bits=given) for given in (False, True))
    scales = quantise(exact.keys[0], (exact.values or exact.keys)[0])
    of_channels = scales["channel_scales"].float()[:, None]
    bounds = scales["key_scales"].float()[..., None] * of_channels, scales["value_scales"].float()[..., None]
    for found, given, bound in zip(
        (rounded.keys[0], (rounded.values or rounded.keys)[0]),
        (exact.keys[0], (exact.values or exact.keys)[0]),
        (bounds[0], bounds[1] if exact.values else bounds[0]),
        strict=True,
    ):
        assert not torch.equal(found, given)
        assert bool(((found - given).abs() <= 0.51 * bound + 1e-6).all())
    assert rounded.tree.centroids[0] is rounded.keys[0]
    assert rounded.rows_in_8_bits == 0  # there is no GPU whose kernels would read them so


@pytest.mark.parametrize("lookup", ["hierarchical", "flat"])
def test_only_a_flat_lookup_has_them(lookup: str) -> None:
    exact, rounded = (prepared(Multipole(lookup), 64, in_8_bits=given) for given in (False, True))
    assert torch.equal(exact.keys[0], rounded.keys[0]) == (lookup == "hierarchical")


def test_an_empty_cluster_changes_no_other_centroid() -> None:
    """Its centroid is zero, which may be far outside of what keys are."""
    keys, values = 5 + normal(0, 2, 9, 16), normal(1, 2, 9, 16)
    counts = torch.full((2, 9), 3)
    alone = round_centroids(keys, values, counts)
    keys = torch.cat([keys, torch.zeros(2, 2, 16)], 1)
    among = round_centroids(
        keys, torch.cat([values, torch.zeros(2, 2, 16)], 1), torch.nn.functional.pad(counts, (0, 2))
    )
    assert torch.equal(among.keys[:, :9], alone.keys)
    assert torch.equal(among.values[:, :9], alone.values)


def test_clusters_that_take_tokens_in_keep_theirs() -> None:
    exact, rounded = (prepared(Multipole(stream=True, buffer=8), 64, in_8_bits=given) for given in (False, True))
    assert torch.equal(exact.keys[0], rounded.keys[0])


def test_what_kernels_read_in_8_bits_chooses_as_the_restored_centroids_do() -> None:
    layer = small_layer(3, block=64)
    context = replace(layer.context, in_8_bits=True)
    selector = Multipole().prepare(context)
    assert isinstance(selector, ClusterSelector)
    query = layer.queries[:, :, :1]
    restored = selector.steps.flat(query, 60, rows=2, replace=True)
    numbers = replace(selector.steps, in_8_bits=context.rounded_centroids.numbers)
    read = numbers.flat(query, 60, rows=2, replace=True)
    assert torch.equal(read.rows.lengths, restored.rows.lengths)
    assert read.rest is not None
    (left,) = read.rest.segments()
    assert left.scored is not None
    assert left.scored.values.dtype == torch.int8
    assert_close(left.scored.gathered(), selector.values[0], 1e-6)
