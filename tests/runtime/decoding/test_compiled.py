"""Decode steps with compiled layers give the tokens that they give without, and layers are compiled once."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from support.configs import sparse
from support.engines import answered, packed
from support.reference import assert_close
from support.small_index import build_small
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.compiled import (
    WORTH_COMPILING,
    WORTH_JOINING,
    backend_for,
    compile_layers,
)
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget

STEPS = 6


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def _logits(index: OpenIndex, cache: IndexCache) -> torch.Tensor:
    """[STEPS, V]: of a question's last token and of the greedy tokens after it."""
    cache.rewind()
    tokens, found = question_ids(index, "What is an expression?")[None], []
    with torch.inference_mode(), route_attention(index.model, cache.attend):
        for _ in range(STEPS):
            found.append(index.model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[0, -1])
            tokens = found[-1].argmax().view(1, 1)
    return torch.stack(found)


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3", "gemma3")), "gpt-oss"]
)
def test_compiled_steps_give_the_same_logits(tmp_path: Path, family: str) -> None:
    """For layers of several kinds too; all layers of one kind share what is compiled."""
    index = build_small(tmp_path / "small.skv", family)
    compiled = replace(index, model=deepcopy(index.model))
    compile_layers(compiled.model, backend="aot_eager")
    expected, found = (
        _logits(one, one.cache(sparse("squeezed", Squeezed(), Budget(0.3)))) for one in (index, compiled)
    )
    assert_close(found, expected.double(), 1e-5)
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 4
    assert_close(_logits(compiled, compiled.dense_cache()), _logits(index, index.dense_cache()).double(), 1e-5)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def test_compiled_steps_of_several_sequences_give_the_same_answers(tmp_path: Path) -> None:
    index = build_small(tmp_path / "small.skv")
    compiled = replace(index, model=deepcopy(index.model))
    compile_layers(compiled.model, backend="aot_eager", shape=(1, 3))
    asked = [question_ids(index, question) for question in ("What is an expression?", "x", "Why?", "And how?")]
    found, expected = (
        answered(packed(one, one.cache(sparse("squeezed", Squeezed(), Budget(0.3))), 3), asked, Sampling(6))
        for one in (compiled, index)
    )
    assert {number: one.ids for number, one in found.items()} == {number: one.ids for number, one in expected.items()}
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("mode", "device", "steps", "shape", "backend"),
    [
        ("auto", "cuda", WORTH_COMPILING, (1, 1), "inductor"),
        ("auto", "cuda", WORTH_COMPILING, (1, 4), "inductor"),
        ("auto", "cuda", WORTH_COMPILING - 1, (1, 1), "eager"),
        ("auto", "cuda", WORTH_COMPILING - 1, (1, 4), None),
        ("auto", "cuda", WORTH_JOINING, (1, 1), "eager"),
        ("auto", "cuda", WORTH_JOINING - 1, (1, 1), None),
        ("auto", "cpu", WORTH_COMPILING, (1, 1), None),
        ("on", "cpu", 1, (1, 1), "inductor"),
        ("off", "cuda", WORTH_COMPILING, (1, 1), None),
    ],
)
def test_many_steps_on_a_gpu_are_worth_compiling(
    mode: str, device: str, steps: int, shape: tuple[int, int], backend: str | None
) -> None:
    assert backend_for(mode, torch.device(device), steps, shape) == backend


def test_compiling_leaves_kernels_where_they_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton keeps what it compiles in one folder, whether a process uses torch's compiler or not."""
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    before = triton.knobs.cache.dir
    compile_layers(build_small(tmp_path / "small.skv").model, backend="aot_eager").remove()
    assert triton_cache_dir(0) == triton.knobs.cache.dir == before
