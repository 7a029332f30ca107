"""On a GPU, verifying passes are replayed as CUDA graphs, and lossless answers are still dense attention's."""

import pytest
from support.configs import LOSSLESS
from support.small_index import INDEXERS, reopen, small_plan

from sparsekv.indexing.build import build_index
from sparsekv.runtime.decoding import lossless
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import Engine, Request
from sparsekv.runtime.decoding.lossless import DraftingEngine
from sparsekv.runtime.decoding.open import OpenIndex

pytestmark = pytest.mark.gpu
QUESTIONS = ("What is an expression?", "x", "Which statement is it that raises an exception, and when?")


@pytest.fixture(scope="module", params=[("llama", None), ("gemma3", None), ("gpt-oss", None), ("llama", "int8")])
def on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    family, kv_dtype = request.param
    methods = {name: INDEXERS[name] for name in ("codes", "multipole")}
    plan, folder = small_plan(family, methods=methods, kv_dtype=kv_dtype), tmp_path_factory.mktemp("gpu") / "small.skv"
    plan.loaded.model.to("cuda")
    build_index(plan, folder)
    return reopen(plan, folder)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", LOSSLESS)
def test_replayed_passes_give_dense_attentions_answers(
    on_gpu: OpenIndex, monkeypatch: pytest.MonkeyPatch, name: str, temperature: float
) -> None:
    """Answers are longer than the rows that are reserved at first, and one engine answers question after question."""
    monkeypatch.setattr(lossless, "AGAIN", 1)  # on a busy machine, measured paces could leave out all drafts
    sampling = Sampling(max_new_tokens=300, temperature=temperature, seed=5)
    requests = [Request(question_ids(on_gpu, question), sampling) for question in QUESTIONS]
    dense = [answer.ids for _, answer in Engine(on_gpu, on_gpu.dense_cache()).answers(requests)]
    engine = DraftingEngine(on_gpu, on_gpu.cache(LOSSLESS[name]), LOSSLESS[name])
    assert [answer.ids for _, answer in engine.answers(requests)] == dense
    assert engine.verification is not None
    # GPT-OSS picks its experts on the host.
    assert bool(engine.verification.verifying.graphs) == (on_gpu.model.config.model_type != "gpt_oss")
    assert engine.drafter.accepted > 0 or temperature
