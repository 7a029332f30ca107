"""An index in 8 bits on a GPU: built there, restored to the same bits as on a CPU, and decoded over from everywhere."""

from typing import Any

import pytest
import torch
from support.configs import sparse
from support.engines import answered, packed
from support.random_tensors import normal
from support.reference import assert_close
from support.small_index import INDEXERS, random_ids, reopen, small_plan, stepped_logits

from sparsekv.formats.index.context_rows import context_rows, quantise
from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import QuestionPrefill
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.cache.kv_store import PLACEMENTS, Int8Middle
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.quoka import Quoka
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_stored_and_restored_as_on_a_cpu(dtype: torch.dtype) -> None:
    keys, values = (normal(seed, 2, 300, 64).to(dtype) for seed in (0, 1))
    keys += 9 * normal(2, 2, 1, 64).to(dtype)
    here, there = quantise(keys, values), quantise(keys.cuda(), values.cuda())
    assert all(torch.equal(there[name].cpu(), tensor) for name, tensor in here.items())
    later = quantise(values.cuda(), keys.cuda(), like=here)
    assert all(torch.equal(later[name].cpu(), rows) for name, rows in quantise(values, keys, like=here).items())
    parts = (context_rows(tensors, dtype).part(slice(10, 290)) for tensors in (here, there))
    for on_cpu, on_gpu in zip(*parts, strict=True):
        assert torch.equal(on_gpu.cpu(), on_cpu)


METHODS: dict[str, tuple[str, Method]] = {
    "squeezed": ("squeezed", Squeezed()),
    "two levels": ("multipole", Multipole("hierarchical", opened=2.0)),
    "multipole": ("multipole", Multipole()),
    "codes": ("codes", Codes()),
    "quest": ("quest", Quest(page_size=5)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "guard": {"guard": Guard(0.02)},
    "prefill quoka": {"question": QuestionPrefill("quoka", Quoka(), Budget(0.2), chunk_size=5)},
}
QUESTIONS = ("What is an expression?", "x", "Which statement raises an exception, and when?")
GREEDY = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module", params=["gemma2", "gpt-oss"])
def on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """One in 8 bits, built on the GPU."""
    plan = small_plan(request.param, kv_dtype="int8", methods=INDEXERS)
    plan.loaded.model.cuda()
    folder = tmp_path_factory.mktemp("gpu") / "int8.skv"
    build_index(plan, folder)
    return reopen(plan, folder)


@pytest.mark.parametrize("name", METHODS)
def test_kernels_read_rows_in_8_bits_as_plain_torch_reads_restored_ones(on_gpu: OpenIndex, name: str) -> None:
    """Rows from the host or the disk are restored, and attended to without a kernel."""
    named, tokens = METHODS[name], random_ids(40).cuda()
    caches = {where: on_gpu.cache(sparse(*named, Budget(0.2), placement=where)) for where in PLACEMENTS}
    there = {where: stepped_logits(on_gpu, cache, tokens, question=9).cpu() for where, cache in caches.items()}
    assert_close(there["device"], there["host"], 1e-4)
    assert_close(there["device"], there["disk"], 1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_take_restored_rows(on_gpu: OpenIndex, name: str) -> None:
    tokens, there = random_ids(40).cuda(), []
    for where in ("device", "host"):
        cache = on_gpu.cache(sparse(*METHODS["multipole"], Budget(0.2), placement=where, **OPTIONS[name]))
        there.append(stepped_logits(on_gpu, cache, tokens, question=9).cpu())
    assert_close(there[0], there[1], 1e-4)


def test_tokens_that_are_taken_in_are_rounded_and_forgotten(on_gpu: OpenIndex) -> None:
    tokens, streaming = random_ids(60).cuda(), Multipole(stream=True, buffer=8)
    cache = on_gpu.cache(sparse("multipole", streaming, Budget(1.0)))
    once, again = (stepped_logits(on_gpu, cache, tokens, question=9).cpu() for _ in range(2))
    assert_close(once, again, 1e-5)
    expected = stepped_logits(on_gpu, on_gpu.dense_cache(), tokens, question=9)
    assert_close(once, expected.cpu(), 2e-2)


def test_rows_that_the_probe_read_are_those_that_are_kept(on_gpu: OpenIndex) -> None:
    tokens, its = random_ids(40).cuda(), (on_gpu.artifact.manifest.model, on_gpu.artifact.manifest.tokenizer)
    held = open_index(on_gpu.artifact, on_gpu.model, on_gpu.tokenizer, its, hold=True)
    for name in (*METHODS, None):
        found, expected = (
            stepped_logits(index, cache, tokens, question=9).cpu()
            for index in (held, on_gpu)
            for cache in [index.dense_cache() if name is None else index.cache(sparse(*METHODS[name], Budget(0.2)))]
        )
        assert_close(found, expected, 1e-5)


def test_everything_attended_is_dense_attention(on_gpu: OpenIndex) -> None:
    tokens = random_ids(40).cuda()
    expected = stepped_logits(on_gpu, on_gpu.dense_cache(), tokens, question=9)
    cache = on_gpu.cache(sparse("squeezed", Squeezed(), Budget(1.0)))
    assert_close(stepped_logits(on_gpu, cache, tokens, question=9).cpu(), expected.cpu(), 1e-4)
    assert list(Artifact(on_gpu.artifact.folder, thorough=True).verify())


@pytest.mark.parametrize("name", ["multipole", None], ids=["sparse", "dense"])
def test_questions_that_decode_together_answer_as_each_alone(on_gpu: OpenIndex, name: str | None) -> None:
    asked = [question_ids(on_gpu, question) for question in QUESTIONS]
    cache = on_gpu.dense_cache() if name is None else on_gpu.cache(sparse(*METHODS[name], Budget(1.0)))
    expected = [generate(on_gpu, cache, one, GREEDY).ids for one in asked]
    together = answered(packed(on_gpu, cache, 3), asked, GREEDY)
    assert [together[number].ids for number in range(len(asked))] == expected


def test_less_of_a_gpu_is_taken_than_by_restored_rows(on_gpu: OpenIndex) -> None:
    layer = on_gpu.artifact.manifest.indexed_layers[0]
    rows = on_gpu.cache(sparse("squeezed", Squeezed(), Budget(0.2))).layers[layer].plan.middle
    assert isinstance(rows, Int8Middle)
    restored = sum(one.nbytes for one in rows.from_row(0))
    assert sum(one.buffer.nbytes for one in rows.rows.values()) < 0.6 * restored * 2 / on_gpu.dtype.itemsize
