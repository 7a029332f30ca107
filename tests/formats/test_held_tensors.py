"""Files that wait to be written have a bound on the memory that was taken for them, and on no other."""

from concurrent.futures import ThreadPoolExecutor, TimeoutError

import pytest
import torch

from sparsekv.formats.index.growing_file import HeldTensors

KILOBYTE = {"rows": torch.zeros(1024, dtype=torch.uint8)}


def test_a_file_waits_until_those_before_it_leave_room() -> None:
    held = HeldTensors(2048)
    held.add("first", KILOBYTE, wait=True)
    held.add("second", KILOBYTE, wait=True)
    with ThreadPoolExecutor(1) as thread:
        third = thread.submit(held.add, "third", KILOBYTE, wait=True)
        with pytest.raises(TimeoutError):
            third.result(0.1)
        assert held.get("third") is None
        held.drop("first")
        third.result(10)
    assert held.get("third") is KILOBYTE


def test_tensors_whose_memory_is_needed_anyway_take_no_room() -> None:
    held = HeldTensors(1024)
    for number in range(3):
        held.add(f"context {number}", KILOBYTE, wait=False)
    held.add("method", KILOBYTE, wait=True)
    assert held.get("context 0") is held.get("method") is KILOBYTE


def test_one_larger_file_may_be_there_alone() -> None:
    held = HeldTensors(10)
    held.add("large", KILOBYTE, wait=True)
    held.drop("large")
    assert held.get("large") is None
