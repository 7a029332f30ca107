"""Rows of an index in blocks of any layout: written by the engine's function, compared without knowing the layout."""

import pytest
import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.context_rows import ContextRows, context_rows, quantise
from sparsekv.runtime.vllm.paged import PagedLayer, Write, slots_of

HEADS, TOKENS, CHANNELS, BLOCK, BLOCKS = 2, 50, 8, 16, 7
REQUEST = [5, 2, 6, 3]  # the request's blocks


def rows(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.randn(2, HEADS, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed))
    return {"keys": made[0], "values": made[1]}


def side_by_side(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """A token's values behind its keys, as FlashAttention's blocks have them."""
    cache[slots // BLOCK, :, slots % BLOCK] = torch.cat([keys, values], 2).to(cache.dtype)


def keys_by_channel(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """A block's keys by channel, then its values by token, as on a CPU."""
    parts = cache.view(len(cache), HEADS, 2, BLOCK * CHANNELS)
    of_keys = parts[:, :, 0].unflatten(2, (CHANNELS, BLOCK)).transpose(2, 3)
    of_values = parts[:, :, 1].unflatten(2, (BLOCK, CHANNELS))
    of_keys[slots // BLOCK, :, slots % BLOCK] = keys
    of_values[slots // BLOCK, :, slots % BLOCK] = values


def bytes_of_float8(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    side_by_side(keys, values, cache.view(torch.float8_e4m3fn), slots)


def values_first(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    side_by_side(values, keys, cache, slots)


def paged(write: Write, dtype: torch.dtype = torch.float32, stored: torch.dtype = torch.float32) -> PagedLayer:
    kept = torch.uint8 if stored == torch.float8_e4m3fn else stored
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * CHANNELS, dtype=kept)
    return PagedLayer(cache, write, dtype, stored)


def read_side_by_side(layer: PagedLayer) -> torch.Tensor:
    """Keys and values [2, Hk, T, D] in the request's blocks, by the definition of that layout."""
    blocks = layer.cache.view(layer.stored).float()[REQUEST]
    tokens = blocks.transpose(1, 2).reshape(-1, HEADS, 2, CHANNELS)
    return tokens.permute(2, 1, 0, 3)


@pytest.mark.parametrize(
    ("dtype", "stored", "tolerance"),
    [
        (torch.float32, torch.float32, 0),
        (torch.bfloat16, torch.bfloat16, 2**-8),
        (torch.bfloat16, torch.float8_e4m3fn, 2**-3),
    ],
    ids=str,
)
def test_loaded_tokens_are_in_their_slots(dtype: torch.dtype, stored: torch.dtype, tolerance: float) -> None:
    layer = paged(bytes_of_float8 if stored == torch.float8_e4m3fn else side_by_side, dtype, stored)
    stored_rows = rows()
    layer.load(context_rows(stored_rows, torch.float32), 16, slots_of(REQUEST, BLOCK, range(16, 48)))
    found, expected = read_side_by_side(layer), torch.stack([stored_rows["keys"], stored_rows["values"]])
    torch.testing.assert_close(found[:, :, 16:48], expected[:, :, 16:48], rtol=tolerance, atol=tolerance / 8)
    assert not found[:, :, :16].any()
    assert not found[:, :, 48:].any()


def test_int8_rows_are_restored() -> None:
    exact = rows()
    stored = context_rows(quantise(exact["keys"], exact["values"]), torch.float32)
    layer = paged(side_by_side)
    layer.load(stored, 0, slots_of(REQUEST, BLOCK, range(TOKENS)))
    assert torch.equal(read_side_by_side(layer)[:, :, :TOKENS], torch.stack(stored.part(slice(TOKENS))))


def test_many_rows_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, stored = paged(side_by_side), context_rows(rows(), torch.float32)
    monkeypatch.setattr("sparsekv.runtime.vllm.paged.PIECE", 7)
    layer.load(stored, 0, slots_of(REQUEST, BLOCK, range(TOKENS)))
    assert torch.equal(read_side_by_side(layer)[:, :, :TOKENS], torch.stack(stored.part(slice(TOKENS))))


def filled(write: Write, given: ContextRows, dtype: torch.dtype = torch.float32) -> PagedLayer:
    """A cache that the engine itself has filled with a request's rows, and with those of other requests."""
    layer = paged(write, dtype, dtype)
    layer.cache.copy_(torch.randn(layer.cache.shape, generator=torch.Generator().manual_seed(5)))
    layer.load(given, 0, slots_of(REQUEST, BLOCK, range(TOKENS)))
    return layer


COMPARED = range(28, 36)  # in two blocks


@pytest.mark.parametrize("write", [side_by_side, keys_by_channel])
def test_the_distance_is_that_of_the_tokens_alone_in_any_layout(write: Write) -> None:
    own, stored = rows(1), rows(2)
    layer = filled(write, context_rows(own, torch.float32))
    found = layer.distance(context_rows(stored, torch.float32), COMPARED, slots_of(REQUEST, BLOCK, COMPARED))
    ours, theirs = (
        torch.stack([one["keys"], one["values"]])[:, :, COMPARED.start : COMPARED.stop] for one in (own, stored)
    )
    assert found == pytest.approx(float((ours - theirs).norm() / theirs.norm()), rel=1e-5)
    assert layer.distance(context_rows(own, torch.float32), COMPARED, slots_of(REQUEST, BLOCK, COMPARED)) == 0


def test_the_comparison_leaves_the_cache_as_it_was() -> None:
    layer = filled(keys_by_channel, context_rows(rows(1), torch.float32))
    before = layer.cache.clone()
    layer.distance(context_rows(rows(2), torch.float32), COMPARED, slots_of(REQUEST, BLOCK, COMPARED))
    assert torch.equal(layer.cache, before)


def test_rounding_of_the_cache_is_no_difference() -> None:
    stored = context_rows(rows(), torch.float32)
    layer = filled(side_by_side, stored, torch.bfloat16)
    assert layer.distance(stored, COMPARED, slots_of(REQUEST, BLOCK, COMPARED)) == 0


def test_a_cache_between_other_layers_is_written_through_its_strides() -> None:
    """One layer of a tensor of all layers, whose blocks follow each other only after those of the other layers."""
    layers = torch.zeros(BLOCKS, 3, HEADS, BLOCK, 2 * CHANNELS)
    layer, stored = (
        PagedLayer(layers[:, 1], side_by_side, torch.float32, torch.float32),
        context_rows(rows(), torch.float32),
    )
    layer.load(stored, 0, slots_of(REQUEST, BLOCK, range(TOKENS)))
    assert torch.equal(read_side_by_side(layer)[:, :, :TOKENS], torch.stack(stored.part(slice(TOKENS))))
    assert layer.distance(stored, COMPARED, slots_of(REQUEST, BLOCK, COMPARED)) == 0
    assert not layers[:, [0, 2]].any()


def test_rows_in_another_layout_are_far() -> None:
    """The engine wrote keys and values, and the connector values and keys."""
    stored = context_rows(rows(), torch.float32)
    layer = filled(side_by_side, stored)
    bent = PagedLayer(layer.cache, values_first, torch.float32, torch.float32)
    assert bent.distance(stored, COMPARED, slots_of(REQUEST, BLOCK, COMPARED)) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("write", [side_by_side, values_first, keys_by_channel])
def test_rows_are_read_from_any_layout(write: Write, dtype: torch.dtype) -> None:
    stored = context_rows(rows(), dtype)
    layer = paged(write, dtype, dtype)
    layer.load(stored, 0, slots_of(REQUEST, BLOCK, range(TOKENS)))
    some = [40, 3, 17, 16, 15]
    slots = slots_of(REQUEST, BLOCK, range(TOKENS))[some]
    for found, expected in zip(layer.find_layout(CHANNELS).read(layer, slots), stored.part(slice(None)), strict=True):
        assert torch.equal(found, expected[:, some].to(dtype))


def test_finding_a_layout_leaves_the_cache_as_it_was() -> None:
    layer = filled(keys_by_channel, context_rows(rows(1), torch.float32))
    before = layer.cache.clone()
    layer.find_layout(CHANNELS)
    assert torch.equal(layer.cache, before)


def keys_over_values(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    side_by_side(keys, keys, cache, slots)


@pytest.mark.parametrize(
    "layer", [paged(keys_over_values), paged(bytes_of_float8, torch.bfloat16, torch.float8_e4m3fn)]
)
def test_a_cache_that_rounds_or_drops_rows_has_no_layout(layer: PagedLayer) -> None:
    with pytest.raises(UsageError, match="rounds keys and values"):
        layer.find_layout(CHANNELS)


def test_slots_follow_the_requests_blocks() -> None:
    assert slots_of(REQUEST, 4, range(3, 9)).tolist() == [23, 8, 9, 10, 11, 24]
