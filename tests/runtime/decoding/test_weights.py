"""Indices of models whose weights are rounded when they are loaded: answers, identity and refusals."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.plain_talk import SAMPLING, plain_answer
from support.reference import assert_close
from support.sealing import reseal
from support.small_index import INDEXERS, plain_logits_after, random_ids, reopen, small_plan, stepped_logits
from support.tiny_models import FAMILIES, save_tiny, tiny_tokenizer

from sparsekv.cli.common.loading import load
from sparsekv.formats.distributed.group import Ranks
from sparsekv.formats.errors import IdentityError, UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify, load_model
from sparsekv.indexing.build import build_index
from sparsekv.kernels.linear.quantised import QuantisedLinear
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.load import load_and_open, with_weights
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.selection.interface import Budget

by_weights = pytest.mark.parametrize("weights", ["int8", "int4"])


def loaded_with(weights: str | None, family: str = "llama") -> LoadedModel:
    plain = LoadedModel(FAMILIES[family](), tiny_tokenizer(), f"tiny-{family}", None)
    return with_weights(plain, weights, _silent)  # type: ignore[arg-type]


def _silent(text: str) -> None:
    raise AssertionError(text)


def built(folder: Path, weights: str | None, family: str = "llama") -> OpenIndex:
    plan = small_plan(loaded=loaded_with(weights, family), methods={"codes": INDEXERS["codes"]})
    build_index(plan, folder)
    return reopen(plan, folder)


Built = Callable[..., OpenIndex]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Indices by the weights and the family of their models, each built once; a test may not change them."""
    folder = tmp_path_factory.mktemp("weights")
    return functools.cache(lambda *of: built(folder / f"{of}.skv", *of))


@pytest.mark.thinned
@by_weights
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_a_greedy_answer_is_the_one_of_transformers_with_the_same_weights(
    family: str, weights: str, known: Built
) -> None:
    index = known(weights, family)
    question = random_ids(9)
    expected = plain_answer(index, torch.cat([index.input_ids, question]))
    for cache in (index.dense_cache(), index.cache(sparse("codes", Codes(), Budget(1.0)))):
        assert generate(index, cache, question, SAMPLING).ids == expected


@by_weights
def test_logits_are_the_plain_models_whatever_the_number_of_rows(weights: str, known: Built) -> None:
    """A question of many tokens is multiplied by dequantised weights, and steps are by the compiled products."""
    index, tokens = known(weights, "llama"), random_ids(40)
    logits = stepped_logits(index, index.dense_cache(), tokens, question=30)
    assert_close(logits, plain_logits_after(index, tokens).double(), 1e-4)


@by_weights
def test_an_index_knows_its_weights(weights: str, known: Built) -> None:
    index = known(weights, "llama")
    stored, plain = index.artifact.manifest.model, identify(loaded_with(None))[0]
    assert stored.weights == weights
    assert stored.weights_hash == plain.weights_hash
    assert identify(index.loaded)[0] == stored


@pytest.mark.parametrize("pair", [("int8", None), ("int8", "int4"), (None, "int8")])
def test_a_model_with_other_weights_is_refused(pair: tuple[str | None, str | None], known: Built) -> None:
    index, other = known(pair[0], "llama"), loaded_with(pair[1])
    with pytest.raises(IdentityError) as refusal:
        open_index(index.artifact, other.model, other.tokenizer, identify(other))
    names = [one or "the checkpoint's" for one in pair]
    told = f"precision of weights differs: the index was built with {names[0]}, this is {names[1]}"
    assert str(refusal.value).startswith(told)
    assert "--model tiny-llama" in str(refusal.value)


@by_weights
def test_a_build_with_other_weights_takes_no_rows_over(weights: str, tmp_path: Path) -> None:
    before = built(tmp_path / "i.skv", None).artifact.manifest
    told: list[str] = []
    plan = small_plan(loaded=loaded_with(weights), methods={"codes": INDEXERS["codes"]})
    build_index(plan, tmp_path / "i.skv", tell=told.append)
    after = Artifact(tmp_path / "i.skv").manifest
    assert not before.files.keys() - after.files.keys()
    assert all(before.files[name].sha256 != after.files[name].sha256 for name in after.files if "context" in name)
    assert any("was built with --weights auto, unlike this call" in line for line in told), told


def test_an_index_of_a_version_without_the_field_opens(tmp_path: Path) -> None:
    index = built(tmp_path / "i.skv", None)

    def forget(manifest: dict[str, dict[str, str]]) -> None:
        del manifest["model"]["weights"]

    reseal(tmp_path / "i.skv", forget)
    assert "weights" not in json.loads((tmp_path / "i.skv" / "manifest.json").read_text())["model"]
    artifact, loaded = Artifact(tmp_path / "i.skv"), index.loaded
    assert (
        open_index(artifact, loaded.model, loaded.tokenizer, identify(loaded)).artifact.manifest.model.weights is None
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, and an index `int8.skv` beside it."""
    save_tiny(tmp_path / "model")
    loaded = with_weights(load_model(str(tmp_path / "model"), device="cpu"), "int8", _silent)
    build_index(small_plan(loaded=loaded), tmp_path / "int8.skv")
    return tmp_path


Opening = Callable[..., OpenIndex]


@pytest.fixture
def opening(folder: Path) -> Opening:
    def open_it(**options: str) -> OpenIndex:
        return load_and_open(Artifact(folder / "int8.skv"), str(folder / "model"), "cpu", **options)  # type: ignore[arg-type]

    return open_it


@pytest.mark.parametrize("options", [{}, {"weights": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_a_model_is_loaded_with_its_indexs_weights(opening: Opening, options: dict[str, str]) -> None:
    index = opening(**options)
    assert isinstance(index.model.get_output_embeddings(), QuantisedLinear)
    assert index.loaded.weights == "int8"


def test_weights_that_are_not_the_indexs_are_refused_before_a_model_is_loaded(opening: Opening) -> None:
    with pytest.raises(UsageError, match="--weights int4: the index was built with int8 weights; leave the option out"):
        opening(weights="int4")


def test_several_ranks_are_refused_with_a_remedy_that_the_command_can_follow(folder: Path) -> None:
    """An index keeps its weights, so a command that opens it cannot choose others."""
    ranks, model = Ranks(0, 2, torch.device("cpu")), str(folder / "model")
    with pytest.raises(UsageError) as opened:
        load_and_open(Artifact(folder / "int8.skv"), model, "cpu", ranks=ranks)
    assert str(opened.value) == (
        "--gpus 2: the index was built with --weights int8, and rounded weights are not split over ranks; leave --gpus "
        "out, or build the index again without --weights"
    )
    with pytest.raises(UsageError, match="--weights int8 cannot be combined with --gpus; leave one of them out"):
        load(model, "cpu", "auto", None, quiet=True, weights="int8", ranks=ranks)


def test_a_model_of_experts_tells_how_little_is_rounded() -> None:
    told: list[str] = []
    loaded = LoadedModel(FAMILIES["gpt-oss"](), tiny_tokenizer(), "tiny-gpt-oss", None)
    with_weights(loaded, "int4", told.append)
    (line,) = told
    assert line.startswith("--weights int4 rounds ")
    assert "% of the weights: those of experts and routers stay as they are" in line
