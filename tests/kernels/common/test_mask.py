"""The mask that a model asks for: its window is measured, and whatever is no window is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from sparsekv.kernels.common.mask import UnsupportedAttentionError, make_mask, window_of

POSITIONS = 1024


def made(function: Callable[..., Any], *, tokens: int = 100, positions: int = POSITIONS, **more: Any) -> torch.Tensor:
    """The marker for `tokens` queries of a model with so many positions."""
    config = LlamaConfig(max_position_embeddings=positions)
    return make_mask(1, tokens, tokens, mask_function=function, config=config, **more)


@pytest.mark.parametrize("window", [1, 2, 3, 31, 32, 33, 100, 511, 512, 513, 1000, 1023])
def test_a_window_is_measured_whatever_the_sequence(window: int) -> None:
    function = sliding_window_causal_mask_function(window)
    assert {window_of(made(function, tokens=tokens)) for tokens in (1, 7, 100, 1024)} == {window}


@pytest.mark.parametrize("window", [None, POSITIONS, POSITIONS + 1, 10 * POSITIONS])
def test_a_window_of_all_positions_is_none(window: int | None) -> None:
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    assert window_of(made(function, tokens=POSITIONS, local_size=window)) is None


def test_a_sequence_longer_than_such_a_window_is_refused() -> None:
    told = r"a sliding window of 1024 tokens to a sequence longer than max_position_embeddings \(1024 in the config\)"
    with pytest.raises(UnsupportedAttentionError, match=told):
        window_of(made(sliding_window_causal_mask_function(POSITIONS), tokens=2 * POSITIONS))


def test_the_narrowest_of_two_windows_counts() -> None:
    both = and_masks(sliding_window_overlay(40), sliding_window_causal_mask_function(30))
    assert window_of(made(both)) == 30
    assert window_of(made(and_masks(causal_mask_function, sliding_window_overlay(20)), use_vmap=True)) == 20


def prefix(batch: int, head: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key < 5


def every_other(batch: int, head: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (query - key) % 2 == 0


def growing(batch: int, head: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & (2 * key >= query)


def in_chunks(batch: int, head: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & (key // 600 == query // 600)


def not_itself(batch: int, head: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key < query


@pytest.mark.parametrize(
    "function",
    [
        bidirectional_mask_function,
        or_masks(causal_mask_function, prefix),
        or_masks(sliding_window_causal_mask_function(20), prefix),
        and_masks(causal_mask_function, every_other),
        growing,
        in_chunks,
        not_itself,
    ],
    ids=["bidirectional", "prefix", "prefix and window", "every other", "growing", "chunks", "not itself"],
)
def test_any_other_mask_is_refused_even_before_it_differs(function: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"which an index cannot reproduce; choose a model with causal"):
        window_of(made(function, tokens=4))


def test_a_mask_of_tensors_is_measured_over_the_passs_own_positions() -> None:
    chunked = chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int64))
    assert window_of(made(chunked, tokens=64)) is None
    with pytest.raises(UnsupportedAttentionError, match="neither causal"):
        window_of(made(chunked, tokens=65))


def test_a_marker_is_the_same_from_pass_to_pass_and_poisons_arithmetic() -> None:
    marker = made(sliding_window_causal_mask_function(30))
    assert made(sliding_window_causal_mask_function(30), tokens=7) is marker
    assert window_of(marker[:, :, :, :50]) == 30
    assert marker.isnan().all()
    for other in (marker + 0, torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4, dtype=torch.bool)):
        with pytest.raises(UnsupportedAttentionError, match="a mask that the model itself makes or changes"):
            window_of(other)
