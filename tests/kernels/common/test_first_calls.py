"""Tests of the first calls on a GPU, which are made while weights are read."""

import pytest
import torch

from sparsekv.kernels.common.first_calls import make_first_calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_call_succeeds_for_each_dtype_of_a_model(dtype: torch.dtype) -> None:
    make_first_calls(torch.device("cuda"), dtype)
