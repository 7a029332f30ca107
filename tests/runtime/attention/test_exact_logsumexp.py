"""Tests of the log-sum-exp of the rows that are always attended, as a step of one sequence gives it to a selector."""

import pytest
import torch
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.runtime.attention.executors import Step

SCALE = 0.3


@pytest.mark.parametrize("learned", [False, True], ids=["", "learned sinks"])
def test_a_step_tells_of_all_that_is_always_attended(learned: bool) -> None:
    query, keys, sinks = normal(1, 2, 3, 4, 16), normal(2, 2, 9, 16), normal(3, 2, 3) if learned else None
    mask = torch.arange(9) <= torch.arange(4)[:, None] + 5
    step = Step(query, keys, keys, mask, 5, None, 0, joint=True, how=(SCALE, None, sinks))
    logits = (SCALE * query.double() @ keys.double().transpose(1, 2)[:, None]).masked_fill(~mask, -torch.inf)
    assert_close(step.queries.exact_logsumexp(), _total(logits, sinks), 1e-6)


def _total(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    beside = [] if sinks is None else [sinks[..., None, None].double().expand(*logits.shape[:-1], 1)]
    return torch.cat([logits, *beside], -1).logsumexp(-1)
