"""Sources on a GPU, whose decode steps are captured: the weights of the model's own attention."""

import pytest
import torch
from support.configs import sparse
from support.small_index import INDEXERS, reopen, small_plan
from support.source_shares import retrieval_shares

from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.answer import Answer, Sampling
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.selection.interface import Budget

pytestmark = pytest.mark.gpu
QUESTION = torch.arange(40, 60)
ANSWER = Sampling(12)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    plan, folder = small_plan(methods={"codes": INDEXERS["codes"]}), tmp_path_factory.mktemp("gpu") / "small.skv"
    plan.loaded.model.to("cuda")  # type: ignore[arg-type]  # transformers wraps torch's own `to`
    build_index(plan, folder)
    return reopen(plan, folder)


@pytest.fixture(params=["dense", "codes"])
def session(index: OpenIndex, request: pytest.FixtureRequest) -> Session:
    """A session that attends to everything, by either path."""
    config = {"dense": DecodeConfig(Dense()), "codes": sparse("codes", Codes(), Budget(1.0))}[request.param]
    opened = Session.open(index, config)
    opened.ask(QUESTION, ANSWER)  # captures steps from which no queries are taken
    return opened


def test_scores_are_those_of_the_models_own_attention(session: Session) -> None:
    answer = session.ask(QUESTION, ANSWER, sources=5)
    assert session.cache.graphs
    _check(session.index, QUESTION, answer)


def test_answers_of_a_batch_have_their_own_sources(session: Session) -> None:
    questions = [QUESTION, QUESTION[:5], QUESTION[3:]]
    for question, answer in zip(questions, session.ask_all(questions, ANSWER, together=2, sources=5), strict=True):
        _check(session.index, question, answer)


def _check(index: OpenIndex, question: torch.Tensor, answer: Answer) -> None:
    """The scores are the mean weights of the retrieval heads in the passages."""
    shares = retrieval_shares(index, question, answer)
    assert len(answer.sources) == 5
    for one in answer.sources:
        assert one.score == pytest.approx(float(shares[slice(*one.tokens)].sum()), rel=1e-3)
