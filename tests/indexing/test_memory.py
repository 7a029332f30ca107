"""The plan of a build's memory, beside what a prefill holds."""

import pytest
import torch
from support.small_index import small_plan
from support.tiny_models import FAMILIES

from sparsekv.indexing.capture.capture import capture
from sparsekv.indexing.plan import BuildPlan, plan_memory


def _held(plan: BuildPlan, positions: torch.Tensor) -> int:
    """Bytes of what a finished prefill holds: keys and values, and sampled queries."""
    model = plan.loaded.model
    captured = capture(model, plan.prompt.input_ids, tail=plan.config.tail, positions=positions)
    layers = [captured.take(layer) for layer in plan.kinds.attending]
    tensors = [tensor for one in layers for tensor in (one.keys, one.values, one.sample) if tensor is not None]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_that_a_prefill_holds(family: str) -> None:
    plan = small_plan(family)
    assert plan_memory(plan, 0, 0).rows == _held(plan, torch.zeros(0, dtype=torch.int64))


def test_sampled_queries_are_part_of_it() -> None:
    plan = small_plan()
    assert plan_memory(plan, 40, 0).rows == _held(plan, torch.arange(0, 80, 2))
