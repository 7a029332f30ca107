"""A talk on a GPU, where answers are decoded by captured steps: it is the plain model's, whatever the setting was."""

import pytest
from support.plain_talk import QUESTIONS, SAMPLING, plain_talk
from support.small_index import INDEXERS, reopen, small_plan

from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Conversation
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec

pytestmark = pytest.mark.gpu
METHODS: dict[str, Method] = {
    "squeezed": Squeezed(),
    "codes": Codes(),
    "multipole": Multipole(stream=True, buffer=16),
    "snapkv": SnapKV(),
}


def setting(name: str) -> DecodeConfig:
    """A method that reads everything."""
    return DecodeConfig(MethodSpec(name, "", METHODS[name]), Budget(1.0))


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """A small index built and opened on the GPU; one of the families has sliding layers."""
    plan, folder = small_plan(request.param, methods=INDEXERS), tmp_path_factory.mktemp("talk") / "small.skv"
    plan.loaded.model.to("cuda")  # type: ignore[arg-type]  # transformers wraps torch's own `to`
    build_index(plan, folder)
    return reopen(plan, folder)


@pytest.mark.parametrize("name", METHODS)
def test_a_talk_goes_on_by_captured_steps(on_gpu: OpenIndex, name: str) -> None:
    talk = Conversation(on_gpu, setting(name))
    assert [talk.ask(question, SAMPLING).ids for question in QUESTIONS] == list(plain_talk(on_gpu))


@pytest.mark.parametrize("name", METHODS)
def test_another_setting_sees_the_same_turns(on_gpu: OpenIndex, name: str) -> None:
    talk = Conversation(on_gpu, setting("multipole"))
    answers = [talk.ask(question, SAMPLING).ids for question in QUESTIONS[:2]]
    talk.switch(setting(name))
    assert [*answers, talk.ask(QUESTIONS[2], SAMPLING).ids] == list(plain_talk(on_gpu))
