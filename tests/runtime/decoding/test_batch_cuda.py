"""Questions that decode together on a GPU: captured steps answer as those that are launched, and as each alone."""

from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.small_index import INDEXERS, reopen, small_plan

from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import Dense, Own, QuestionPrefill
from sparsekv.runtime.decoding.batch import Batch
from sparsekv.runtime.decoding.compiled import compile_steps
from sparsekv.runtime.decoding.generate import Sampling, generate, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.codes import Codes, CodesSelector
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.lessismore import LessIsMore
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.pqcache import PQCache
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection import code_scan
from sparsekv.runtime.selection.interface import Budget, Method, Queries, Selection

pytestmark = pytest.mark.gpu
QUESTIONS = ("What is an expression?", "x", "Which statement raises an exception, and when?", "Why?", "And how?", "No.")
GREEDY = Sampling(max_new_tokens=20)
DENSE = Dense()
CAPTURED: dict[str, Method] = {
    "squeezed": Squeezed(),
    "multipole": Multipole(),
    "quest": Quest(page_size=4),
    "pqcache": PQCache(rerank=2.0),
    "csattention": CSAttention(),
    "codes": Codes(),
}
LAUNCHED: dict[str, Method] = {"snapkv": SnapKV(window_queries=4), "lessismore": LessIsMore()}
"""They choose by what each sequence asked, one after another."""


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt-oss"])
def on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    plan, folder = small_plan(request.param, methods=INDEXERS), tmp_path_factory.mktemp("gpu") / "small.skv"
    plan.loaded.model.to("cuda")  # type: ignore[arg-type]  # transformers wraps torch's own `to`
    build_index(plan, folder)
    return reopen(plan, folder)


def _together(index: OpenIndex, batch: Batch, asked: list[torch.Tensor]) -> list[list[int]]:
    found = dict(batch.answers(asked))
    return [found[number].ids for number in range(len(asked))]


@pytest.mark.parametrize("prefill", [Own(), DENSE], ids=["", "prefilled densely"])
@pytest.mark.parametrize("name", [*CAPTURED, *LAUNCHED, "dense"])
def test_everything_attended_gives_each_its_own_answer(
    on_gpu: OpenIndex, name: str, prefill: Dense | Own | QuestionPrefill
) -> None:
    asked = [question_ids(on_gpu, question) for question in QUESTIONS]
    cache = (
        on_gpu.dense_cache()
        if name == "dense"
        else on_gpu.cache(sparse(name, (CAPTURED | LAUNCHED)[name], Budget(1.0), question=prefill))
    )
    expected = [generate(on_gpu, cache, one, GREEDY).ids for one in asked]
    for slots in (1, 3, 8):
        assert _together(on_gpu, Batch(on_gpu, cache, GREEDY, slots), asked) == expected


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize("residual", [False, True], ids=["dropped", "residual"])
def test_captured_steps_answer_as_launched_ones(on_gpu: OpenIndex, name: str, residual: bool) -> None:
    asked = [question_ids(on_gpu, question) for question in QUESTIONS]
    cache = on_gpu.cache(sparse(name, CAPTURED[name], Budget(0.2), residual=residual))
    captured, launched = (Batch(on_gpu, cache, GREEDY, 4) for _ in range(2))
    launched.shared.capture = False
    assert _together(on_gpu, captured, asked) == _together(on_gpu, launched, asked)
    # GPT-OSS picks its experts on the host.
    assert bool(captured.shared.graphs) == (on_gpu.model.config.model_type != "gpt_oss")
    read = [dict(batch.answers(asked))[0].kv_fraction for batch in (captured, launched)]
    assert read[0] == pytest.approx(read[1], rel=0.2)  # a captured step of three is fed one of them twice


def test_codes_are_scanned_by_kernels_for_each_question(on_gpu: OpenIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a document that is long enough for it: captured as launched, and mostly what torch chooses."""
    asked = [question_ids(on_gpu, question) for question in QUESTIONS]
    chosen, plain = [], CodesSelector.choose_for_each

    def choose(selector: CodesSelector, queries: Queries, budget: Budget, counter: torch.Tensor) -> Selection | None:
        chosen.append(plain(selector, queries, budget, counter))
        return chosen[-1]

    def batch() -> Batch:
        return Batch(on_gpu, on_gpu.cache(sparse("codes", Codes(), Budget(0.2))), GREEDY, 4)

    in_torch = dict(batch().answers(asked))[0].kv_fraction
    monkeypatch.setattr(code_scan, "FEWEST_KEYS", 1)
    monkeypatch.setattr(CodesSelector, "choose_for_each", choose)
    captured, launched = batch(), batch()
    launched.shared.capture = False
    assert _together(on_gpu, captured, asked) == _together(on_gpu, launched, asked)
    assert chosen
    assert all(one is not None for one in chosen)
    read = [dict(one.answers(asked))[0].kv_fraction for one in (captured, launched)]
    assert read == pytest.approx([in_torch, in_torch], rel=0.3)


def test_compiled_steps_answer_as_others(tmp_path: Path) -> None:
    plan = small_plan("qwen3", methods=INDEXERS)
    plan.loaded.model.to("cuda")  # type: ignore[arg-type]  # transformers wraps torch's own `to`
    build_index(plan, tmp_path / "small.skv")
    index = reopen(plan, tmp_path / "small.skv")
    asked = [question_ids(index, question) for question in QUESTIONS]
    cache = index.cache(sparse("multipole", Multipole(), Budget(0.2)))
    expected = _together(index, Batch(index, cache, GREEDY, 4), asked)
    batch = Batch(index, cache, GREEDY, 4)
    assert compile_steps(index.model, batch.one_step, tokens=4) > 0
    assert _together(index, batch, asked) == expected
    assert batch.shared.graphs


def test_rows_of_their_own_that_outgrow_their_buffers(on_gpu: OpenIndex) -> None:
    asked = [question_ids(on_gpu, question) for question in QUESTIONS[:3]]
    cache = on_gpu.cache(sparse("multipole", Multipole(), Budget(0.2)))
    answers = []
    for capture in (True, False):
        batch = Batch(on_gpu, cache, Sampling(max_new_tokens=300), 3)
        batch.shared.capture = capture
        answers.append(_together(on_gpu, batch, asked))
    assert answers[0] == answers[1]
