"""Norm and RoPE of a token's query and key heads, by the definition and by the kernel, against float64."""

from collections.abc import Callable

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.linear.quantised import RowNorm
from sparsekv.kernels.linear.rotated_heads import rotated_heads
from sparsekv.kernels.linear.rotated_heads_triton import rotated_heads_triton

pytestmark = compiled_or_interpreted
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def exact(head: torch.Tensor, angles: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    """Rotate a head [D] in float64: its channels i and i + D / 2 are a complex number."""
    head = head.double()
    if norm is not None:
        weight, epsilon = norm
        head = head / (head.square().mean() + epsilon).sqrt() * weight.double()
    first, second = head.chunk(2)
    rotated = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([rotated.real, rotated.imag])


@pytest.mark.parametrize("rotated", [rotated_heads.reference, rotated_heads_triton], ids=["torch", "kernel"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels", [2, 64, 96, 128, 256])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 1), (8, 2)])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_and_rotated(
    rotated: Callable[..., torch.Tensor], dtype: torch.dtype, channels: int, queries: int, keys: int, normed: bool
) -> None:
    heads = (5 * normal(1, queries + keys, channels)).to(dtype)
    angles = 100 * normal(2, channels // 2).double()
    cos, sin = (torch.cat([part, part]).to(dtype) for part in (angles.cos(), angles.sin()))
    norms = [RowNorm((1 + normal(seed, channels)).to(dtype), 0.5 * seed) for seed in (3, 4)] if normed else []
    with poisoned_memory():
        found = rotated(
            heads.flatten().to(DEVICE),
            queries,
            cos.to(DEVICE),
            sin.to(DEVICE),
            [RowNorm(weight.to(DEVICE), epsilon) for weight, epsilon in norms],
        )
    each = [exact(head, angles, norms[int(place >= queries)] if normed else None) for place, head in enumerate(heads)]
    assert_close(found.cpu(), torch.stack(each), (2 if rotated is rotated_heads_triton else 4) * TOLERANCE[dtype])
