"""Centroids of an index in 8 bits: as close as half a step, and rounded only once."""

import pytest
import torch
from support.random_tensors import normal
from support.small_layer import small_layer

from sparsekv.formats.index.context_rows import (
    CENTROID_SCALES,
    KEYS,
    LARGEST,
    VALUES,
    with_centroids_in_8_bits,
    with_restored_centroids,
)

Tensors = dict[str, torch.Tensor]


def restored(stored: Tensors) -> Tensors:
    return with_restored_centroids(stored, torch.float32)


def clusters(seed: int, number: int, offset: float = 5.0) -> Tensors:
    keys, values = offset + normal(seed, 2, number, 128), normal(seed + 1, 2, number, 128)
    return {KEYS: keys, VALUES: values, "level0.counts": torch.full((2, number), 3)}


@pytest.mark.parametrize("block", [None, 64], ids=["whole", "blocks"])
def test_they_are_off_by_half_a_step_at_most(block: int | None) -> None:
    tensors = small_layer(3, levels=(0.1, 0.02), block=block).context.tensors
    stored = with_centroids_in_8_bits(tensors)
    scales = {name: stored[name].float() for name in CENTROID_SCALES}
    steps = scales["level0.centroid_scales"][..., None] * scales["level0.centroid_channel_scales"][:, None]
    found = restored(stored)
    assert found.keys() == tensors.keys()
    for name, step in ((KEYS, steps), (VALUES, scales["level0.value_centroid_scales"][..., None])):
        assert stored[name].dtype == torch.int8
        assert not torch.equal(found[name], tensors[name])
        assert bool(((found[name] - tensors[name]).abs() <= 0.51 * step + 1e-6).all())
    assert all(torch.equal(found[name], tensors[name]) for name in tensors if name not in (KEYS, VALUES))


def test_clusters_without_values_have_none() -> None:
    tensors = {name: tensor for name, tensor in clusters(0, 9).items() if name != VALUES}
    stored = with_centroids_in_8_bits(tensors)
    assert not any("value" in name for name in stored)
    assert restored(stored).keys() == tensors.keys()


def test_a_method_without_clusters_is_stored_as_it_is() -> None:
    tables = {"codes": torch.ones(2, 9, 4, dtype=torch.uint8)}
    assert with_centroids_in_8_bits(tables) == tables
    assert restored(tables) == tables


def test_an_empty_cluster_changes_no_other_centroid() -> None:
    """Its centroid is zero, which may be far outside of what keys are."""
    some = clusters(0, 9)
    more = {
        name: torch.nn.functional.pad(tensor, (0, 0, 0, 2)) for name, tensor in some.items() if name in (KEYS, VALUES)
    }
    more["level0.counts"] = torch.nn.functional.pad(some["level0.counts"], (0, 2))
    alone, among = (restored(with_centroids_in_8_bits(tensors)) for tensors in (some, more))
    assert torch.equal(among[KEYS][:, :9], alone[KEYS])
    assert torch.equal(among[VALUES][:, :9], alone[VALUES])


def grown_by(more: int, *, known: int = 200) -> tuple[Tensors, Tensors, Tensors]:
    """Return stored tensors of bfloat16 clusters, the restored ones grown by new clusters, and the grown ones as
    stored. One known cluster takes a token in."""
    before = with_centroids_in_8_bits(in_bfloat16(clusters(0, known)))
    old, new = with_restored_centroids(before, torch.bfloat16), in_bfloat16(clusters(2, more, offset=-200.0))
    grown = {name: torch.cat([old[name], new[name]], 1) for name in new}
    grown[KEYS][:, 7], grown["level0.counts"][:, 7] = 1.0, 4
    return before, grown, with_centroids_in_8_bits(grown, before)


def in_bfloat16(tensors: Tensors) -> Tensors:
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def test_clusters_that_stay_keep_their_numbers() -> None:
    """Also where those that follow are far outside of the range of channels, which all share."""
    before, grown, stored = grown_by(30)
    stays, anew = torch.arange(200) != 7, with_centroids_in_8_bits(grown)
    for name in (KEYS, VALUES, "level0.centroid_scales", "level0.value_centroid_scales"):
        assert torch.equal(stored[name][:, :200][:, stays], before[name][:, stays])
    assert not torch.equal(anew[KEYS][:, :200][:, stays], before[KEYS][:, stays])
    of_channels = stored["level0.centroid_channel_scales"].float()[:, None]
    steps = stored["level0.centroid_scales"].float()[..., None] * of_channels
    off = (with_restored_centroids(stored, torch.float32)[KEYS] - grown[KEYS].float()).abs()
    assert bool((off[:, 200:] <= 0.51 * steps[:, 200:]).all())
    assert bool((off[:, 7] <= 0.51 * steps[:, 7]).all())


@pytest.mark.parametrize(("known", "more"), [(200, 250), (20, 10)], ids=["less than half", "few"])
def test_channels_of_a_few_centroids_are_not_shared(known: int, more: int) -> None:
    """The channels' scales of a few centroids would fit the other centroids badly."""
    _, grown, stored = grown_by(more, known=known)
    anew = with_centroids_in_8_bits(grown)
    assert all(torch.equal(stored[name], tensor) for name, tensor in anew.items())


def test_numbers_keep_within_their_range() -> None:
    stored = with_centroids_in_8_bits(clusters(4, 50))
    assert all(int(stored[name].abs().amax()) == LARGEST for name in (KEYS, VALUES))
