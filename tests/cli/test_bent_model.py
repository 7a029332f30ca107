"""Every command that opens an index with its model refuses one whose mask was bent; so does a build."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.bent_models import BENDS, BEYOND, BentLlama, attention_bent_by
from support.command import fails, run_here
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparsekv.formats.errors import IdentityError
from sparsekv.formats.index.schema import MANIFEST
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


BUILD = ("build-index", "doc.txt", "--model", "model", "-q")


@contextmanager
def _loaded_as(kind: type[PreTrainedModel]) -> Iterator[None]:
    """Within the context transformers loads Llamas as models of this kind."""
    # `register` of transformers 5.17 ignores transformers' own configs.
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[LlamaConfig] = kind
    try:
        yield
    finally:
        MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(LlamaConfig)


@pytest.fixture(params=BENDS)
def bent(request: pytest.FixtureRequest) -> Iterator[None]:
    """While it lasts, transformers loads a Llama with a mask of its own."""
    with _loaded_as(type("Bent", (BentLlama,), {"bend": staticmethod(BENDS[request.param])})):
        yield


@pytest.fixture(params=BEYOND)
def beyond(request: pytest.FixtureRequest) -> type[PreTrainedModel]:
    """A Llama whose mask is bent where the tokens of a build's preflight do not show it."""
    return attention_bent_by(f"beyond_{request.param}", BEYOND[request.param])


@pytest.mark.thinned
@pytest.mark.parametrize("command", OPENING)
@pytest.mark.usefixtures("bent")
def test_an_index_that_was_built_before(place: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
    (place / "questions.txt").write_text("Why?\nHow?\n")
    fails(1, *OPENING[command], says=("probe", "masks other tokens", "--model", "build the index again"))
    assert not (place / "longer.skv").exists()


@pytest.mark.parametrize("command", ["generate", "chat", "append"])
def test_an_index_that_was_built_before_a_bend_beyond_the_preflight(
    place: Path, command: str, beyond: type[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
    before = {path: path.read_bytes() for path in Path("doc.skv").rglob("*") if path.is_file()}
    with _loaded_as(beyond):
        fails(1, *OPENING[command], says=("probe", "masks other tokens", "--model", "build the index again"))
    assert {path: path.read_bytes() for path in Path("doc.skv").rglob("*") if path.is_file()} == before


@pytest.mark.thinned
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_build_of_a_model_that_is_bent_beyond_the_preflight(
    place: Path, kv_dtype: str, beyond: type[PreTrainedModel]
) -> None:
    build = (*BUILD, "-o", "bent.skv", "--kv-dtype", kv_dtype)
    with _loaded_as(beyond):
        fails(1, *build, says=("attends with a mask or a bias", "at token", "choose another model"))
        fails(2, "generate", "Why?", "--index", "bent.skv", says=("no index at bent.skv",))
    assert not Path("bent.skv").exists()
    built = run_here(*build)
    assert (built.code, built.stdout, built.stderr) == (0, "bent.skv\n", "")


def test_a_build_that_is_refused_after_several_chunks_keeps_none(place: Path, beyond: type[PreTrainedModel]) -> None:
    build = (*BUILD, "-o", "bent.skv", "--chunk-size", "64")
    with _loaded_as(beyond):
        for _ in range(2):
            fails(1, *build, says=("attends with a mask or a bias", "at token", "choose another model"))
            assert not Path("bent.skv").exists()


@pytest.mark.thinned
@pytest.mark.parametrize("options", [(), ("--force",)], ids=str)
def test_a_refused_build_leaves_the_index_that_was_there(
    place: Path, options: tuple[str, ...], beyond: type[PreTrainedModel]
) -> None:
    Path("doc.txt").write_text(Path("doc.txt").read_text() + "One more line.\n" * 20)
    before = Path("doc.skv", MANIFEST).read_bytes()
    with _loaded_as(beyond):
        fails(
            1,
            *BUILD,
            "-o",
            "doc.skv",
            *options,
            says=("or masks other tokens" if not options else "attends with a mask",),
        )
    assert Path("doc.skv", MANIFEST).read_bytes() == before
    assert run_here("generate", "Why?", "--max-new-tokens", "2").code == 0


@pytest.mark.usefixtures("bent")
def test_a_build(place: Path) -> None:
    fails(
        1,
        *BUILD,
        "-o",
        "bent.skv",
        says=("cannot be indexed", "has a mask that the model itself makes", "choose another model"),
    )
    assert not Path("bent.skv").exists()


@pytest.mark.usefixtures("bent")
def test_the_python_interface(place: Path) -> None:
    with pytest.raises(IdentityError, match="masks other tokens"):
        api.open_index(place / "doc.skv")
