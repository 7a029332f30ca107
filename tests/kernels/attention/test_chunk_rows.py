"""The rows that a chunk attends to, gathered by a kernel, are bit for bit those of plain torch."""

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.pairs import every_pair
from support.random_tensors import normal

from sparsekv.kernels.attention.attention import chunk_rows
from sparsekv.kernels.attention.chunk_rows_triton import chunk_rows_triton

pytestmark = compiled_or_interpreted


def some_rows(seed: int, heads: int, tokens: int, count: int) -> torch.Tensor:
    """Random rows [heads, count] int64, none twice in a head, in any order."""
    scores = torch.rand(heads, tokens, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(1)[:, :count]


def assert_copied(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor) -> None:
    """With uninitialised queries in front of the chunk's, and without."""
    tensors = query, keys, values, chosen
    for padded in (False, True):
        expected = chunk_rows.reference(*tensors, padded=padded)
        with poisoned_memory():
            found = chunk_rows_triton(*(one.to(DEVICE) for one in tensors), padded=padded)
        for name, one, other in zip(("query", "keys", "values"), found, expected, strict=True):
            assert one.shape == other.shape
            start = chosen.shape[1] if padded and name == "query" else 0
            assert torch.equal(one[:, start:].cpu(), other[:, start:]), name


@every_pair({"dtype": [torch.float32, torch.float16, torch.bfloat16], "D": [64, 96, 128, 256], "G": [1, 3, 8]})
def test_chosen_rows_then_the_chunk(G: int, D: int, dtype: torch.dtype) -> None:
    keys, values = (normal(seed, 2, 90, D).to(dtype) for seed in (0, 1))
    assert_copied(normal(2, 2 * G, 20, D).to(dtype), keys, values, some_rows(D, 2, 70, 21))


@pytest.mark.parametrize(("count", "chunk"), [(1, 1), (16, 16), (200, 1), (1, 200), (150, 333)])
def test_any_number_of_rows(count: int, chunk: int) -> None:
    keys, values = (normal(seed, 2, 200 + chunk, 64) for seed in (3, 4))
    assert_copied(normal(5, 4, chunk, 64), keys, values, some_rows(count, 2, 200, count))


def test_parts_of_longer_rows_in_which_heads_alternate() -> None:
    keys, values = (normal(seed, 150, 2, 64).transpose(0, 1)[:, 10:130] for seed in (6, 7))
    query = normal(8, 40, 4, 64).transpose(0, 1)[:, 5:25]
    assert_copied(query, keys, values, some_rows(0, 2, 100, 60)[:, 5:35])


def test_where_the_tensors_lie_decides() -> None:
    tensors = normal(9, 6, 20, 64), normal(10, 2, 80, 64), normal(11, 2, 80, 64), some_rows(1, 2, 60, 9)
    found = chunk_rows(*(one.to(DEVICE) for one in tensors))
    for one, other in zip(found, chunk_rows.reference(*tensors), strict=True):
        assert torch.equal(one.cpu(), other)
