"""Program that computes the turn of codes with several threads. A test can kill the program if it hangs."""

import torch

from sparsekv.indexing.indexers.product_codes import key_turn, query_turn


def check_turn(D: int) -> None:
    """Check that the matrix for keys is the inverse of the matrix for queries."""
    torch.set_num_threads(2)
    random = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(2, rows, D, generator=random) for rows in (600, 300))
    turn = query_turn(keys, queries, 8, torch.ones(2, 600))
    error = turn.double() @ key_turn(turn).double().transpose(1, 2) - torch.eye(D, dtype=torch.double)
    assert error.abs().max() <= 1e-5, error.abs().max()
