"""Queries and rows whose offsets exceed 2^31 elements, as in a question of 262,145 tokens and 64 heads of 128 channels.

Here three tokens are 2^30 elements apart. Memory between them is never touched, and so it takes no room on a CPU.
"""

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted
from support.random_tensors import normal

from sparsekv.kernels.attention.attention import of_last
from sparsekv.kernels.attention.shared_decode_triton import shared_decode_triton, shared_logsumexp_triton
from sparsekv.kernels.clusters.shared_choice_triton import choose_together_triton
from sparsekv.kernels.common.kernel_inputs import RunRows
from sparsekv.kernels.common.run_rows_triton import store_in_slots_triton

pytestmark = compiled_or_interpreted
D, TOKENS, SCALE = 16, 3, 0.3


def rows(seed: int, number: int) -> torch.Tensor:
    return normal(seed, 1, number, D).half().to(DEVICE)


@pytest.fixture(scope="module")
def far() -> torch.Tensor:
    """Queries [1, 1, TOKENS, D] that are far apart."""
    memory = torch.empty(2**31 + D, dtype=torch.float16, device=DEVICE)
    return memory.as_strided((1, 1, TOKENS, D), (D, D, 2**30, 1)).copy_(rows(0, TOKENS)[None])


def test_attention_of_far_queries(far: torch.Tensor) -> None:
    shared, own = rows(1, 40), of_last(rows(2, 5), rows(3, 5), TOKENS)
    runs = RunRows(shared, shared, torch.arange(4, dtype=torch.int32, device=DEVICE)[None], None, 4)
    one, other = (shared_decode_triton(query, runs, (shared, shared), [], own, SCALE) for query in (far, far.clone()))
    assert torch.equal(one, other)
    one, other = (shared_logsumexp_triton(query, shared, own, SCALE) for query in (far, far.clone()))
    assert torch.equal(one, other)


def test_choice_of_clusters_by_far_queries(far: torch.Tensor) -> None:
    counts = torch.full((1, 20), 3, dtype=torch.int32, device=DEVICE)
    ends = torch.arange(1, TOKENS + 1, dtype=torch.int32, device=DEVICE)
    clusters = rows(5, 20), counts, counts.cumsum(-1) - counts
    one, other = (choose_together_triton(query, ends, *clusters, 6, 60, SCALE) for query in (far, far.clone()))
    assert torch.equal(one.lengths, other.lengths)


def test_rows_of_far_tokens_are_stored(far: torch.Tensor) -> None:
    stored = torch.zeros(2, 1, 1, TOKENS, D, dtype=torch.float16, device=DEVICE)
    slots, places = torch.zeros(TOKENS, dtype=torch.int64, device=DEVICE), torch.arange(TOKENS, device=DEVICE)
    store_in_slots_triton((stored[0], stored[1]), (far[0], far[0]), slots, places)
    assert torch.equal(stored[0], far)
