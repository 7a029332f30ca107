"""Ranks that sum tensors through shared memory, on any device."""

import torch

from sparsekv.kernels.distributed.shared_memory import MOST_BYTES, PROGRAMS, SharedMemory
from sparsekv.kernels.distributed.sum_triton import sum_triton

# Sizes rise and fall and dtypes change, because all sums use the same two buffers in turn.
PARTS = (
    ((1, 1, 4096), torch.bfloat16),
    ((3, 5), torch.float32),
    ((1,), torch.float16),
    ((2, 700), torch.bfloat16),
    ((MOST_BYTES // 4,), torch.float32),
    ((1, 1, 4096), torch.bfloat16),
    ((257,), torch.float32),
)


def part(rank: int, number: int) -> torch.Tensor:
    """Return the tensor that a rank adds to one of the sums."""
    shape, dtype = PARTS[number]
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * number + rank)).to(dtype)


def exact_sum(ranks: int, number: int) -> torch.Tensor:
    """Return the sum of all ranks' parts in float64."""
    return torch.stack([part(rank, number).double() for rank in range(ranks)]).sum(0)


def as_seen_by(number: int, memory: list[torch.Tensor]) -> SharedMemory:
    """Return a rank's view of the shared memory of all ranks."""
    device = memory[number].device
    places = torch.tensor([one.data_ptr() for one in memory], device=device)
    return SharedMemory(number, places, torch.zeros(PROGRAMS, dtype=torch.int32, device=device), memory[number])


def add_up_all(number: int, memory: list[torch.Tensor], rounds: int) -> list[torch.Tensor]:
    """Return one rank's results of all sums, in several rounds."""
    view = as_seen_by(number, memory)
    return [sum_triton(part(number, at), view) for _ in range(rounds) for at in range(len(PARTS))]


def check_rank(number: int, memory: list[torch.Tensor]) -> None:
    """Check all sums in a process that is one of the ranks."""
    for at, total in enumerate(add_up_all(number, memory, rounds=2)):
        assert_sum(total, len(memory), at % len(PARTS))


def assert_sum(total: torch.Tensor, ranks: int, number: int) -> None:
    exact, dtype = exact_sum(ranks, number), PARTS[number][1]
    error = (total.cpu().double() - exact).norm() / exact.norm()
    assert (total.shape, total.dtype) == (exact.shape, dtype)
    assert error < {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
