"""Attention to shared rows and rows of each sequence's own, against each sequence by itself in float64."""

import math

import torch
from support.pairs import every_pair
from support.random_tensors import normal
from support.reference import assert_close, reference_attention

from sparsekv.kernels.attention.attention import OwnRows, Segment, shared_attention

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TIMES = 3  # tokens that a centroid stands for


@every_pair(
    {
        "dtype, tolerance": TOLERANCES.items(),
        "D": [64, 96, 128, 256],
        "Hk, G, B": [(1, 1, 1), (2, 3, 5), (3, 8, 2)],
        "softcap": [None, 3.0],
        "with_sinks": [False, True],
    }
)
def test_each_sequence_attends_as_if_it_were_alone(
    dtype: torch.dtype, tolerance: float, D: int, Hk: int, G: int, B: int, softcap: float | None, with_sinks: bool
) -> None:
    def rows(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * normal(seed, *shape, D).to(dtype), normal(seed + 1, *shape, D).to(dtype)

    query, tokens, centroids, own = (
        2 * normal(0, Hk, G, B, D).to(dtype),
        rows(1, Hk, 40),
        rows(3, Hk, 7),
        rows(5, B, Hk, 12),
    )
    used = 1 + 3 * torch.arange(B) % 12  # the first has one row
    first = (used - 4).clamp(min=0)
    seen = normal(7, B, 40) > -1
    sinks = normal(8, Hk, G) if with_sinks else None
    shared = [Segment(*tokens, seen), Segment(*centroids, bias=torch.tensor(math.log(TIMES)))]
    output = shared_attention(query, shared, OwnRows(*own, torch.arange(B), first, used), D**-0.5, softcap, sinks)
    assert (output.dtype, output.shape) == (dtype, query.shape)
    for one in range(B):
        span = slice(int(first[one]), int(used[one]))
        parts = zip(tokens, centroids, own, strict=True)
        keys, values = (torch.cat([a[:, seen[one]], b.repeat(1, TIMES, 1), c[one, :, span]], 1) for a, b, c in parts)
        alone = query[:, :, one : one + 1]
        expected = reference_attention(alone, keys, values, D**-0.5, softcap=softcap, sink_logits=sinks)
        assert_close(output[:, :, one : one + 1], expected, tolerance)
