"""Questions that decode together on a GPU: captured steps answer as those that are launched, and as each alone."""

from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.engines import answered, packed
from support.small_index import INDEXERS, reopen, small_plan

from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import Dense, Own, QuestionPrefill
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.compiled import compile_steps
from sparsekv.runtime.decoding.engine import Engine, Request, generate
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.threads import exclusive
from sparsekv.runtime.methods import codes as code_scan
from sparsekv.runtime.methods.codes import Codes, CodesSelector
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.lessismore import LessIsMore
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.pqcache import PQCache
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.squeezed import Squeezed
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


def _together(engine: Engine, asked: list[torch.Tensor], sampling: Sampling = GREEDY) -> list[list[int]]:
    found = answered(engine, asked, sampling)
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
        assert _together(packed(on_gpu, cache, slots), asked) == expected


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize("residual", [False, True], ids=["dropped", "residual"])
def test_captured_steps_answer_as_launched_ones(on_gpu: OpenIndex, name: str, residual: bool) -> None:
    asked = [question_ids(on_gpu, question) for question in QUESTIONS]
    cache = on_gpu.cache(sparse(name, CAPTURED[name], Budget(0.2), residual=residual))
    captured, launched = (packed(on_gpu, cache, 4) for _ in range(2))
    launched.cache.capturing = False
    assert _together(captured, asked) == _together(launched, asked)
    # GPT-OSS picks its experts on the host.
    assert bool(captured.cache.graphs) == (on_gpu.model.config.model_type != "gpt_oss")
    read = [answered(engine, asked, GREEDY)[0].kv_fraction for engine in (captured, launched)]
    assert read[0] == pytest.approx(read[1], rel=0.2)  # a captured step of three is fed one of them twice


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_of_many_answers_attend_to_everything(on_gpu: OpenIndex, name: str) -> None:
    """Graphs of six answers do, and those of the two that answer on do not; each counts the rows that it reads."""
    lengths = [8, 20, 8, 8, 20, 8]
    asked = [
        Request(question_ids(on_gpu, question), Sampling(max_new_tokens=length))
        for question, length in zip(QUESTIONS, lengths, strict=True)
    ]
    config = sparse(name, CAPTURED[name], Budget(0.2), question=DENSE, dense_from=6)
    found = []
    for capture in (True, False):
        engine = packed(on_gpu, on_gpu.cache(config), 6)
        engine.cache.capturing = capture
        found.append(dict(engine.answers(asked)))
        assert capture == bool(engine.cache.graphs) or on_gpu.model.config.model_type == "gpt_oss"
    captured, launched = found
    for number, answer in captured.items():
        assert answer.ids == launched[number].ids
        assert answer.kv_fraction == pytest.approx(launched[number].kv_fraction, rel=0.02)
        assert (answer.kv_fraction == 1) == (lengths[number] == 8)


def test_codes_are_scanned_by_kernels_for_each_question(on_gpu: OpenIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a document that is long enough for it: captured as launched, and mostly what torch chooses."""
    asked = [question_ids(on_gpu, question) for question in QUESTIONS]
    chosen, plain = [], CodesSelector.choose_for_each

    def choose(selector: CodesSelector, queries: Queries, budget: Budget, counter: torch.Tensor) -> Selection | None:
        chosen.append(plain(selector, queries, budget, counter))
        return chosen[-1]

    def engine() -> Engine:
        return packed(on_gpu, on_gpu.cache(sparse("codes", Codes(), Budget(0.2))), 4)

    in_torch = answered(engine(), asked, GREEDY)[0].kv_fraction
    monkeypatch.setattr(code_scan, "FEWEST_KEYS", 1)
    monkeypatch.setattr(CodesSelector, "choose_for_each", choose)
    captured, launched = engine(), engine()
    launched.cache.capturing = False
    assert _together(captured, asked) == _together(launched, asked)
    assert chosen
    assert all(one is not None for one in chosen)
    read = [answered(one, asked, GREEDY)[0].kv_fraction for one in (captured, launched)]
    assert read == pytest.approx([in_torch, in_torch], rel=0.3)


def test_compiled_steps_answer_as_others(tmp_path: Path) -> None:
    plan = small_plan("qwen3", methods=INDEXERS)
    plan.loaded.model.to("cuda")  # type: ignore[arg-type]  # transformers wraps torch's own `to`
    build_index(plan, tmp_path / "small.skv")
    index = reopen(plan, tmp_path / "small.skv")
    asked = [question_ids(index, question) for question in QUESTIONS]
    cache = index.cache(sparse("multipole", Multipole(), Budget(0.2)))
    expected = _together(packed(index, cache, 4), asked)
    engine = packed(index, cache, 4)
    assert compile_steps(index.model, engine.warm_up, shape=engine.cache.step_shape) > 0
    assert _together(engine, asked) == expected
    assert engine.cache.graphs


def test_rows_of_their_own_that_outgrow_their_buffers(on_gpu: OpenIndex) -> None:
    asked = [question_ids(on_gpu, question) for question in QUESTIONS[:3]]
    cache = on_gpu.cache(sparse("multipole", Multipole(), Budget(0.2)))
    answers = []
    for capture in (True, False):
        engine = packed(on_gpu, cache, 3)
        engine.cache.capturing = capture
        answers.append(_together(engine, asked, Sampling(max_new_tokens=300)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("new", "steps"), [(1, 2), (2, 1)])
def test_questions_wait_until_a_step_takes_several(on_gpu: OpenIndex, new: int, steps: int) -> None:
    """For as many steps as make up half of the four answering sequences, in sum; and the first ones for none."""
    engine = packed(on_gpu, on_gpu.dense_cache(), 8)
    asked = question_ids(on_gpu, QUESTIONS[0])
    with exclusive(on_gpu.model), engine.running():
        engine.waiting.extend(engine.sequence(Request(asked, Sampling(max_new_tokens=30))) for _ in range(4))
        for _ in range(3):
            engine.run_step()
        assert len(engine.active) == 4
        engine.waiting.extend(engine.sequence(Request(asked, Sampling(max_new_tokens=30))) for _ in range(new))
        for _ in range(steps if engine.cache.graphs else 0):
            engine.run_step()
            assert len(engine.active) == 4
        engine.run_step()
        assert len(engine.active) == 4 + new
