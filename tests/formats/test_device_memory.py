"""Tests of a command's message on a GPU's memory before the command starts its work."""

import pytest
import torch

from sparsekv.formats.device import GIB, DeviceMemory, MemoryPlan, device_memory, model_bytes, peak_told
from sparsekv.formats.errors import SparsekvError

PLAN = MemoryPlan(model=14 * GIB, rows=72 * GIB, work=11 * GIB)


def test_the_line_tells_what_is_needed_of_what() -> None:
    assert PLAN.told(DeviceMemory(140 * GIB, 125 * GIB)) == (
        "needs some 97.0 GiB of the GPU's 140.0: 14.0 the model, 72.0 keys and values, 11.0 to work with them"
    )


def test_the_line_says_where_it_may_run_out() -> None:
    assert PLAN.told(DeviceMemory(97 * GIB, 83 * GIB)).endswith("to work with them")
    assert PLAN.told(DeviceMemory(97 * GIB, 83 * GIB - 1)).endswith(
        "; 83.0 are left beside the model, so that memory may run out"
    )


def test_states_are_counted_and_told() -> None:
    plan = MemoryPlan(model=14 * GIB, rows=72 * GIB, work=11 * GIB, states=2 * GIB)
    told = plan.told(DeviceMemory(140 * GIB, 84 * GIB))
    assert told.startswith("needs some 99.0 GiB of the GPU's 140.0: 14.0 the model, 72.0 keys and values, 2.0 states,")
    assert told.endswith("so that memory may run out")
    plan.check(DeviceMemory(97 * GIB, 74 * GIB), "buy another")
    with pytest.raises(SparsekvError, match=r"keys, values and states take 74.0 GiB"):
        plan.check(DeviceMemory(97 * GIB, 73 * GIB), "buy another")


def test_keys_and_values_that_cannot_fit_are_refused() -> None:
    PLAN.check(DeviceMemory(97 * GIB, 72 * GIB), "buy another")
    with pytest.raises(SparsekvError) as refused:
        PLAN.check(DeviceMemory(80 * GIB, 65 * GIB), "buy another")
    assert str(refused.value) == (
        "keys and values take 72.0 GiB, and beside the model 65.0 of the GPU's 80.0 are left; buy another"
    )


def test_a_model_is_what_its_parameters_and_buffers_take() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    assert model_bytes(model) == 4 * (24 + 4 + 4 + 4) + 4 * (4 + 4) + 8


def test_a_cpu_has_no_plan() -> None:
    model = torch.nn.Linear(2, 2)
    assert device_memory(model) is None
    assert peak_told(model) is None
