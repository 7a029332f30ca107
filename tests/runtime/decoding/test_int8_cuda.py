"""An index in 8 bits on a GPU: built there, restored to the same bits as on a CPU, and decoded over from everywhere."""

from pathlib import Path

import pytest
import torch
from support.random_tensors import normal
from support.reference import assert_close
from support.small_index import random_ids, reopen, small_plan, stepped_logits

from sparsekv.formats.context_rows import context_rows
from sparsekv.formats.int8_rows import quantise
from sparsekv.formats.reader import Artifact
from sparsekv.indexing.build import build_index
from sparsekv.runtime.cache.kv_store import PLACEMENTS
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.budget import Budget

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_stored_and_restored_as_on_a_cpu(dtype: torch.dtype) -> None:
    keys, values = (normal(seed, 2, 300, 64).to(dtype) for seed in (0, 1))
    here, there = quantise(keys, values), quantise(keys.cuda(), values.cuda())
    assert all(torch.equal(there[name].cpu(), tensor) for name, tensor in here.items())
    parts = (context_rows(tensors, dtype).part(slice(10, 290)) for tensors in (here, there))
    for on_cpu, on_gpu in zip(*parts, strict=True):
        assert torch.equal(on_gpu.cpu(), on_cpu)


def test_a_build_of_a_gpu_decodes_the_same_wherever_rows_lie(tmp_path: Path) -> None:
    plan, folder = small_plan("gemma2", kv_dtype="int8"), tmp_path / "int8.skv"
    plan.loaded.model.cuda()
    build_index(plan, folder)
    index, tokens = reopen(plan, folder), random_ids(40).cuda()
    expected = stepped_logits(index, index.dense_cache(), tokens, question=9)
    for placement in PLACEMENTS:
        cache = index.sparse_cache("squeezed", Squeezed(), Budget(1.0), placement=placement)
        assert_close(stepped_logits(index, cache, tokens, question=9).cpu(), expected.cpu(), 1e-4)
    assert list(Artifact(folder, thorough=True).verify())
