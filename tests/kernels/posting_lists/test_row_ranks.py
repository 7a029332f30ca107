"""Re-ranking chosen rows by their exact logits: against plain torch, and a sort by float64 probabilities."""

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.random_tensors import normal
from support.ranks import assert_ranks, least_kept, on_cpu

from sparsekv.kernels.posting_lists.list_ranks import TokenRanks, rank_rows, top_ranked
from sparsekv.kernels.posting_lists.top_ranks_triton import rank_rows_triton

pytestmark = compiled_or_interpreted
SCALE = 0.3


def some_rows(seed: int, heads: int, slots: int, keys: int) -> torch.Tensor:
    """Random rows [heads, slots] int32, ascending, none twice."""
    drawn = torch.rand(heads, keys, generator=torch.Generator().manual_seed(seed))
    return drawn.topk(slots, -1).indices.sort(-1).values.int()


def rank(
    query: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    logsumexp: torch.Tensor,
    wanted: int,
    softcap: float | None = None,
) -> TokenRanks:
    """Ranks from the kernels, back on the CPU."""
    query, keys, rows, logsumexp = (tensor.to(DEVICE) for tensor in (query, keys, rows, logsumexp))
    with poisoned_memory():
        return on_cpu(rank_rows_triton(query, keys, rows, logsumexp, wanted, SCALE, softcap))


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("G", "D", "slots"), [(4, 64, 130), (3, 96, 4097), (1, 128, 1)])
def test_the_same_as_in_plain_torch(G: int, D: int, slots: int, dtype: torch.dtype) -> None:
    query, keys = normal(1, 2, G, D).to(dtype), normal(2, 2, 5000, D).to(dtype)
    arguments = query, keys[:, 10:], some_rows(3, 2, slots, 4990), normal(4, 2, G) + 5, max(1, slots // 2)
    assert_ranks(rank(*arguments), rank_rows.reference(*arguments, SCALE))


def test_the_best_are_those_of_highest_probability() -> None:
    """Each chosen row has at least 14/15 of the probability of any other row."""
    query, keys, rows = 2 * normal(1, 2, 3, 64), normal(2, 2, 900, 64), some_rows(3, 2, 600, 900)
    found = rank(query, keys, rows, torch.full((2, 3), -10.0), 90)
    gathered = keys.gather(1, rows.long()[..., None].expand(-1, -1, 64)).double()
    probability = (SCALE * query.double() @ gathered.transpose(1, 2)).softmax(-1).mean(1)
    for head, slots in enumerate(top_ranked.reference(found, 90).long()):
        taken = torch.zeros(600, dtype=torch.bool)
        taken[slots] = True
        assert float(probability[head][taken].min()) >= float(probability[head][~taken].max()) * (1 - 1 / 15)


@pytest.mark.parametrize("estimate", [-30.0, 30.0, 300.0])
def test_the_best_rows_are_chosen_however_wrong_the_estimate_is(estimate: float) -> None:
    query, keys = 2 * normal(1, 2, 3, 64), normal(2, 2, 300, 64)
    logits = SCALE * query.double() @ keys.double().transpose(1, 2)
    totals = logits.logsumexp(-1).float() + estimate
    found = rank(query, keys, torch.arange(300, dtype=torch.int32).repeat(2, 1), totals, 30)
    assert least_kept(top_ranked.reference(found, 30), logits) > 0.97


def test_a_soft_cap() -> None:
    arguments = 3 * normal(1, 2, 2, 64), normal(2, 2, 300, 64), some_rows(3, 2, 200, 300), normal(4, 2, 2), 50
    assert_ranks(rank(*arguments, softcap=2.0), rank_rows.reference(*arguments, SCALE, 2.0))
