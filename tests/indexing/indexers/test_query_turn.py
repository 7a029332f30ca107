"""The turn of codes: what it must keep, and that rounding does not decide it."""

import pytest
import torch
from support.spawned import run_together
from support.threaded_turn import check_turn

from sparsekv.indexing.indexers.product_codes import key_turn, query_turn


def random_rows(seed: int, D: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [2, 300, D] and queries [2, 80, D] whose channels have variances of their own."""
    random = torch.Generator().manual_seed(seed)
    scales = torch.linspace(0.3, 3, D)
    return (torch.randn(2, rows, D, generator=random) * scales for rows in (300, 80))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(4))
def test_products_stay_the_same(seed: int) -> None:
    keys, queries = random_rows(seed)
    turn = query_turn(keys, queries, 4, torch.rand(2, 300) + 0.1)
    turned = (queries @ turn.float()) @ (keys @ key_turn(turn)).transpose(1, 2)
    plain = queries @ keys.transpose(1, 2)
    assert (turned - plain).norm() <= 1e-3 * plain.norm()


@pytest.mark.parametrize("seed", range(4))
def test_what_rounding_changes_does_not_turn_a_direction_round(seed: int) -> None:
    """So that the codes of several processes, and of other machines, are those of one."""
    keys, queries = random_rows(seed)
    noise = 1 + 1e-6 * torch.randn(keys.shape, generator=torch.Generator().manual_seed(seed + 10))
    weights = torch.rand(2, 300, generator=torch.Generator().manual_seed(seed)) + 0.1
    one, other = (query_turn(rows, queries, 4, weights) for rows in (keys, keys * noise))
    assert (one.float() - other.float()).abs().max() <= 2e-3 * one.float().abs().max()


def test_heads_of_more_than_128_channels_by_several_threads() -> None:
    """A batched LU of that many rows never ends there: a process of its own can be ended."""
    run_together(check_turn, [(256,)], 100)
