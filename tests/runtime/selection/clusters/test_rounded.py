"""Centroids of an index in 8 bits: rounded likewise, the same wherever they are read."""

from dataclasses import replace

import pytest
import torch
from support.reference import assert_close
from support.small_layer import as_queries, small_layer

from sparsekv.formats.int8_rows import quantise
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.clusters.selector import ClusterSelector
from sparsekv.runtime.selection.interface import Method


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


@pytest.mark.gpu
def test_kernels_read_them_in_8_bits_and_choose_as_torch_does() -> None:
    layer = small_layer(3, block=64)
    context = replace(layer.context, in_8_bits=True)
    moved = replace(context, tensors={name: tensor.cuda() for name, tensor in context.tensors.items()})
    here, there = Multipole().prepare(context), Multipole().prepare(moved)
    assert isinstance(there, ClusterSelector)
    assert there.rows_in_8_bits == 2 * there.starts.shape[1]
    query = layer.queries[:, :, :1]
    on_cpu = here.select(as_queries(query), Budget(0.3))
    on_gpu = there.select(as_queries(query.cuda()), Budget(0.3))
    assert on_gpu.rest is not None
    (left,) = on_gpu.rest.segments()
    assert left.scored is not None
    assert left.scored.values.dtype == torch.int8
    assert_close(left.scored.gathered().cpu(), here.values[0], 1e-6)  # type: ignore[attr-defined]
    assert int(on_gpu.rows.lengths.sum()) == int(on_cpu.rows.lengths.sum())
