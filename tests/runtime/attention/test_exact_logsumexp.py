"""What a selector is told of the rows that are always attended, by a step of one sequence and by a step of several."""

import pytest
import torch
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.attention.shared_attention import OwnRows
from sparsekv.runtime.attention.packed_layers import _exact_logsumexp
from sparsekv.runtime.attention.step import Step

SCALE = 0.3


@pytest.mark.parametrize("learned", [False, True], ids=["", "learned sinks"])
def test_a_step_tells_of_all_that_is_always_attended(learned: bool) -> None:
    query, keys, sinks = normal(1, 2, 3, 4, 16), normal(2, 2, 9, 16), normal(3, 2, 3) if learned else None
    mask = torch.arange(9) <= torch.arange(4)[:, None] + 5
    step = Step(query, keys, keys, mask, 5, None, 0, joint=True, how=(SCALE, None, sinks))
    logits = (SCALE * query.double() @ keys.double().transpose(1, 2)[:, None]).masked_fill(~mask, -torch.inf)
    assert_close(step.queries.exact_logsumexp(), _total(logits, sinks), 1e-6)


@pytest.mark.parametrize("learned", [False, True], ids=["", "learned sinks"])
def test_several_sequences_are_told_of_their_own_rows_too(learned: bool) -> None:
    query, keys, sinks = normal(1, 2, 3, 4, 16), normal(2, 2, 9, 16), normal(3, 2, 3) if learned else None
    rows, used = normal(4, 5, 2, 7, 16), torch.tensor([1, 7, 3, 5])
    own = OwnRows(rows, rows, torch.tensor([4, 0, 2, 1]), torch.zeros(4, dtype=torch.int64), used)
    logits = [(SCALE * query.double() @ keys.double().transpose(1, 2)[:, None])]
    of_own = torch.einsum("hgbd,bhkd->hgbk", query.double(), rows[[4, 0, 2, 1]].double()) * SCALE
    logits.append(of_own.masked_fill(torch.arange(7) >= used[:, None], -torch.inf))
    assert_close(_exact_logsumexp(query, keys, own, (SCALE, None, sinks)), _total(torch.cat(logits, -1), sinks), 1e-6)


def _total(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    beside = [] if sinks is None else [sinks[..., None, None].double().expand(*logits.shape[:-1], 1)]
    return torch.cat([logits, *beside], -1).logsumexp(-1)
