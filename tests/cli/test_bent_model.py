"""Every command that opens an index with its model refuses one whose mask was bent; so does a build."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bent_models import BENDS, BentLlama
from support.command import fails
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparsekv.formats.errors import IdentityError
from sparsekv.runtime import api

OPENING = {
    "generate": ("generate", "Why?"),
    "dense": ("generate", "Why?", "--method", "dense"),
    "batch": ("generate", "--batch-file", "questions.txt", "--batch-size", "2"),
    "save-to": ("generate", "Why?", "--save-to", "longer.skv"),
    "chat": ("chat",),
    "append": ("append", "doc.txt", "--rebuild"),
    "trace": ("trace", "Why?"),
    "recall-report": ("recall-report", "--queries", "doc.txt"),
}


@pytest.fixture(params=BENDS)
def bent(request: pytest.FixtureRequest) -> Iterator[None]:
    """While it lasts, transformers loads a Llama with a mask of its own."""
    kind = type("Bent", (BentLlama,), {"bend": staticmethod(BENDS[request.param])})
    AutoModelForCausalLM.register(LlamaConfig, kind, exist_ok=True)
    yield
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(LlamaConfig)


@pytest.mark.parametrize("command", OPENING)
@pytest.mark.usefixtures("bent")
def test_an_index_that_was_built_before(place: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
    (place / "questions.txt").write_text("Why?\nHow?\n")
    fails(1, *OPENING[command], says=("probe", "masks other tokens", "--model", "build the index again"))
    assert not (place / "longer.skv").exists()


@pytest.mark.usefixtures("bent")
def test_a_build(place: Path) -> None:
    command = ("build-index", "doc.txt", "--model", "model", "-o", "bent.skv", "-q")
    fails(1, *command, says=("cannot be indexed", "has a mask that the model itself makes", "choose another model"))
    fails(1, "generate", "Why?", "--index", "bent.skv", says=("unfinished",))


@pytest.mark.usefixtures("bent")
def test_the_python_interface(place: Path) -> None:
    with pytest.raises(IdentityError, match="masks other tokens"):
        api.open_index(place / "doc.skv")
