"""A step of several sequences by the kernels that read shared rows in place, against plain torch."""

import math

import pytest
import torch
from support.kernel_runs import DEVICE
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.attention import shared_decode as module
from sparsekv.kernels.attention.attention import Segment
from sparsekv.kernels.attention.shared_attention import OwnRows, shared_attention
from sparsekv.kernels.attention.shared_decode import shared_decode
from sparsekv.kernels.attention.types import RunRows, ScoredCentroids
from sparsekv.kernels.scores.logits import attention_logits

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
M, E, C = 60, 7, 11


def _case(dtype: torch.dtype, Hk: int, G: int, B: int, D: int, used: list[int]) -> tuple[torch.Tensor, ...]:
    def rows(seed: int, *shape: int) -> torch.Tensor:
        return normal(seed, *shape, D).to(dtype).to(DEVICE)

    query, own = 2 * rows(0, Hk, G, B), (rows(1, B, Hk, 12), rows(2, B, Hk, 12))
    shared = [rows(3 + n, Hk, size) for n, size in enumerate((M, M, E, E, C, C))]
    chosen = torch.stack([torch.randperm(M, generator=torch.Generator().manual_seed(h)) for h in range(Hk)])
    counts = torch.tensor([used[h % len(used)] for h in range(Hk)])
    return query, *own, *shared, chosen.to(DEVICE), counts.to(DEVICE)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=lambda value: str(value))
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize(("Hk", "G", "B"), [(1, 1, 1), (2, 3, 5), (3, 8, 2), (2, 4, 16), (1, 7, 11)])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_kernels_attend_as_plain_torch_does(
    dtype: torch.dtype, tolerance: float, D: int, Hk: int, G: int, B: int, softcap: float | None, with_sinks: bool
) -> None:
    query, own_keys, own_values, *shared, chosen, counts = _case(dtype, Hk, G, B, D, [25, 0, M])
    keys, values, exact_keys, exact_values, centroids, stand_values = shared
    used = 1 + 3 * torch.arange(B, device=DEVICE) % 12
    own = OwnRows(own_keys, own_values, (used - 4).clamp(min=0), used)
    sinks = normal(8, Hk, G).to(DEVICE) if with_sinks else None
    log_counts = torch.full((Hk, C), math.log(3.0), device=DEVICE)
    log_counts[:, 2] = -torch.inf
    picked = [rows.gather(1, chosen[..., None].expand(-1, -1, D)) for rows in (keys, values)]
    valid = (torch.arange(M, device=DEVICE) < counts[:, None])[:, None, None]
    segments = [
        Segment(picked[0], picked[1], valid),
        Segment(exact_keys, exact_values),
        Segment(centroids, stand_values, bias=log_counts[:, None, None]),
    ]
    expected = shared_attention(query, segments, own, D**-0.5, softcap, sinks)
    logits = attention_logits(query, centroids, D**-0.5, softcap).transpose(1, 2).flatten(1, 2)
    runs = RunRows(keys, values, chosen.int(), None, M, counts.int())
    stand_ins = [ScoredCentroids(logits, log_counts, stand_values)]
    output = shared_decode(query, runs, (exact_keys, exact_values), stand_ins, own, D**-0.5, softcap, sinks)
    assert (output.dtype, output.shape) == (dtype, query.shape)
    assert_close(output.cpu(), expected.double().cpu(), tolerance)


def test_queries_that_do_not_fit_a_program_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    query, own_keys, own_values, keys, values, exact_keys, exact_values, *_, chosen, counts = _case(
        torch.float32, 2, 3, 9, 64, [30]
    )
    own = OwnRows(own_keys, own_values, torch.zeros(9, device=DEVICE).long(), torch.full((9,), 12, device=DEVICE))
    runs = RunRows(keys, values, chosen.int(), None, M, counts.int())
    whole = shared_decode(query, runs, (exact_keys, exact_values), (), own, 0.125)
    monkeypatch.setattr(module, "QUERY_NUMBERS", 64 * 7)
    assert_close(shared_decode(query, runs, (exact_keys, exact_values), (), own, 0.125).cpu(), whole.cpu(), 1e-6)


def test_with_nothing_shared_each_attends_to_its_own() -> None:
    query, own_keys, own_values, keys, values, *_, chosen, _ = _case(torch.float32, 2, 3, 4, 64, [0])
    own = OwnRows(own_keys, own_values, torch.zeros(4, device=DEVICE).long(), torch.full((4,), 5, device=DEVICE))
    nothing = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    runs = RunRows(keys, values, chosen.int(), None, M, nothing)
    output = shared_decode(query, runs, (keys[:, :0], values[:, :0]), (), own, 0.125)
    assert_close(output.cpu(), shared_attention(query, [Segment(keys[:, :0], values[:, :0])], own, 0.125).cpu(), 1e-6)
