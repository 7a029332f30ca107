"""Two ranks build the index and give the answers of one process, and each opens what the other wrote."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.causal_families import families as families_there
from support.causal_families import has_plan
from support.rank_job import QUESTION
from support.tiny_models import FAMILIES
from support.two_ranks import FRESH, Both, run_both

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import identify, load_model
from sparsekv.runtime.decoding.answer import question_ids
from sparsekv.runtime.decoding.open import open_index

METHODS = ["codes", "multipole", "squeezed", "dense"]
OF_HEADS = ["snapkv", "quest", "quoka", "keydiff", "tidaldecode", "sparq", "loki", "magicpig", "sampleattention"]
STORED = ["csattention", "h2o", "multipole-windowed", "pqcache"]
ROUNDING = 1e-5  # of sums that are split over ranks, in float32
WITH_STATES = [
    "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "nemotron_h", "olmo_hybrid", "lfm2_moe",
    *(name for name in ("bamba", "falcon_h1", "kolibri1", "lfm2", "lfm3", "zaya") if has_plan(name)),
]  # fmt: skip
"""Families whose layers keep states, beside qwen3_next; some are split by newer versions of transformers alone."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return run_both(tmp_path_factory.mktemp("families"), [*FAMILIES], METHODS)


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return run_both(tmp_path_factory.mktemp("methods"), ["llama"], [*OF_HEADS, *STORED])


def _pairs(both: Both, family: str) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """File, name, and both tensors of each that the two indices have."""
    alone, ranks = (Artifact(both.folder / f"{family}-{built}.skv") for built in ("alone", "ranks"))
    assert alone.manifest.files.keys() == ranks.manifest.files.keys()
    for file in alone.manifest.files:
        one, other = alone.tensors(file), ranks.tensors(file)
        assert one.keys() == other.keys()
        for name in one:
            yield file, name, one[name], other[name]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return run_both(tmp_path_factory.mktemp("hybrid"), ["qwen3_next"], ["codes", "dense"])


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Both:
    names = [name for name in WITH_STATES if name in families_there()]
    return run_both(tmp_path_factory.mktemp("hybrids"), names, ["codes", "multipole", "dense"])


def _assert_same_index(both: Both, family: str, rounding: float = ROUNDING) -> None:
    """The codes' turn is of eigenvectors, whose signs rounding decides: there only shapes and types are compared."""
    for file, name, one, other in _pairs(both, family):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if not file.startswith("codes/"):
            assert (one.double() - other.double()).abs().max() <= rounding * one.double().abs().max(), (file, name)


def _assert_same_answers(both: Both, family: str) -> None:
    of_family = {key: answer for key, answer in both.alone.items() if key.startswith(f"{family} ")}
    assert of_family
    for key, answer in of_family.items():
        assert both.ranks[key]["ids"] == answer["ids"], key
        assert both.ranks[key]["kv_fraction"] == pytest.approx(answer["kv_fraction"], rel=1e-6), key
        assert both.alone[key.replace(" ranks ", " alone ")]["ids"] == answer["ids"], key


def test_ranks_build_the_index_of_one_process(fresh: Both) -> None:
    _assert_same_index(fresh, "llama")


def test_ranks_answer_as_one_process_over_both_indices(fresh: Both) -> None:
    _assert_same_answers(fresh, "llama")


@pytest.mark.slow
def test_a_rank_that_cannot_open_the_index_leaves_its_rows_to_the_first_to_write(fresh: Both, tmp_path: Path) -> None:
    """As one on another machine. The files are the same to the byte as those that both write."""
    apart = run_both(tmp_path, ["llama"], FRESH, apart=True)
    assert fresh.deeds[1]["rows"]
    assert apart.deeds[1].get("rows", 0) == 0
    _assert_same_index(apart, "llama")
    written, joined = (Artifact(both.folder / "llama-ranks.skv").manifest.files for both in (fresh, apart))
    assert {name: file.sha256 for name, file in joined.items()} == {name: file.sha256 for name, file in written.items()}


@pytest.mark.slow
def test_keys_and_values_in_8_bits_are_shared_out_with_their_scales(tmp_path: Path) -> None:
    """A number that lies between two may be rounded either way: answers are over the rows that are there."""
    both = run_both(tmp_path, ["llama"], ["multipole", "dense"], "int8")
    assert Artifact(tmp_path / "llama-ranks.skv").manifest.kv_storage is not None
    for key, answer in both.alone.items():
        assert both.ranks[key]["ids"] == answer["ids"], key


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_index_and_answers(families: Both, family: str) -> None:
    _assert_same_index(families, family)
    _assert_same_answers(families, family)


def _assert_plain(both: Both, family: str) -> None:
    """Dense answers are those of plain transformers."""
    index = Artifact(both.folder / f"{family}-ranks.skv")
    loaded = load_model(str(both.folder / family))
    opened = open_index(index, loaded.model, loaded.tokenizer, identify(loaded))
    said = torch.cat([opened.input_ids, question_ids(opened, QUESTION)])
    for id in both.ranks[f"{family} ranks dense"]["ids"]:
        with torch.inference_mode():
            assert int(loaded.model(input_ids=said[None], use_cache=False).logits[0, -1].argmax()) == id
        said = torch.cat([said, torch.tensor([id])])


@pytest.mark.slow
def test_a_model_whose_layers_keep_states_has_the_same_index_and_the_plain_models_answers(hybrid: Both) -> None:
    _assert_same_index(hybrid, "qwen3_next")
    _assert_same_answers(hybrid, "qwen3_next")
    _assert_plain(hybrid, "qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in WITH_STATES if name in families_there()])
def test_every_family_whose_layers_keep_states_has_them_too(hybrids: Both, family: str) -> None:
    _assert_same_index(hybrids, family, 10 * ROUNDING)
    _assert_same_answers(hybrids, family)
    _assert_plain(hybrids, family)


@pytest.mark.slow
def test_every_method_that_chooses_by_head_answers_the_same(methods: Both) -> None:
    _assert_same_answers(methods, "llama")
