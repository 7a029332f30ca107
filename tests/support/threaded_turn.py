"""The turn of codes by several threads, in a process that can be ended where it does not end."""

import torch

from sparsekv.indexing.indexers.product_codes import key_turn, query_turn


def check_turn(D: int) -> None:
    """Its inverse is what keys are turned by."""
    torch.set_num_threads(2)
    random = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(2, rows, D, generator=random) for rows in (600, 300))
    turn = query_turn(keys, queries, 8, torch.ones(2, 600))
    error = turn.double() @ key_turn(turn).double().transpose(1, 2) - torch.eye(D, dtype=torch.double)
    assert error.abs().max() <= 1e-5, error.abs().max()
