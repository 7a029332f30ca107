"""The log-sum-exp of what several sequences attend to always: by a kernel, in plain torch, and by its definition."""

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.pairs import every_pair
from support.random_tensors import normal

from sparsekv.kernels.attention.attention import OwnRows
from sparsekv.kernels.attention.decode_attention import shared_logsumexp
from sparsekv.kernels.attention.shared_decode_triton import shared_logsumexp_triton

pytestmark = compiled_or_interpreted
TOLERANCE = 1e-5  # absolute: what is added to a logarithm multiplies what it is of
S, T = 5, 40


def by_definition(
    query: torch.Tensor, keys: torch.Tensor, own: OwnRows, scale: float, softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """[Hk, G, B] float64, one query after another."""
    Hk, G, B, _ = query.shape
    totals = torch.empty(Hk, G, B, dtype=torch.float64)
    for h in range(Hk):
        for b in range(B):
            slot, first, last = (int(one[b]) for one in (own.slots, own.first, own.used))
            seen = torch.cat([keys[h], own.keys[slot, h, first:last]]).double()
            for g in range(G):
                logits = seen @ query[h, g, b].double() * scale
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                logits = logits if sinks is None else torch.cat([logits, sinks[h, g].double()[None]])
                totals[h, g, b] = logits.logsumexp(-1).cpu()
    return totals


@every_pair(
    {
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "D": [64, 96, 128, 256],
        "Hk, G, B, E": [(1, 1, 1, 0), (2, 3, 5, 7), (3, 8, 2, 150), (1, 7, 11, 64)],
        "softcap, learned": [(None, False), (3.0, True)],
    }
)
def test_totals_by_their_definition(
    dtype: torch.dtype, D: int, Hk: int, G: int, B: int, E: int, softcap: float | None, *, learned: bool
) -> None:  # fmt: skip
    def rows(seed: int, *shape: int) -> torch.Tensor:
        return normal(seed, *shape, D).to(dtype).to(DEVICE)

    query = 2 * rows(0, B, Hk, G).permute(1, 2, 0, 3)  # token by token, as a model has it
    last = 1 + 7 * torch.arange(B, device=DEVICE) % T
    slots = torch.arange(B, device=DEVICE) % S
    own = OwnRows(rows(1, S, Hk, T), rows(2, S, Hk, T), slots, (last - 9).clamp(min=0), last)
    sinks = normal(3, Hk, G).to(dtype).to(DEVICE) if learned else None
    given = query, rows(4, Hk, E), own, D**-0.5, softcap, sinks
    truth = by_definition(*given)
    with poisoned_memory():
        found = shared_logsumexp_triton(*given)
    for total in (found, shared_logsumexp.reference(*given)):
        assert (total.dtype, total.shape) == (torch.float32, (Hk, G, B))
        assert (total.cpu().double() - truth).abs().max() <= TOLERANCE * max(1.0, float(truth.abs().max()))


@pytest.mark.filterwarnings("ignore:divide by zero")  # of the interpreter
def test_a_token_that_sees_nothing_has_no_weight() -> None:
    nothing = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    rows = normal(0, 1, 1, 3, 64).to(DEVICE)
    own = OwnRows(rows, rows, nothing, nothing, nothing)
    given = normal(1, 1, 2, 1, 64).to(DEVICE), rows[0, :, :0], own, 0.1
    with poisoned_memory():
        assert shared_logsumexp_triton(*given).isneginf().all()
    assert shared_logsumexp.reference(*given).isneginf().all()


def test_a_tile_of_infinite_logits_takes_nothing_from_the_others() -> None:
    query, key = torch.full((1, 1, 1, 64), 3e38, device=DEVICE), torch.full((1, 5, 64), -3e38, device=DEVICE)
    rows, zero = torch.zeros(1, 1, 2, 64, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    own = OwnRows(rows, rows, zero, zero, zero + 2)
    with poisoned_memory():
        found = shared_logsumexp_triton(query, key, own, 0.1)
    assert found.item() == pytest.approx(0.693147, abs=1e-5)
