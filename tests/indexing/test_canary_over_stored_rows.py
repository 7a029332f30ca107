"""Builds onto an index compare its canary and its rows, and give a canary to an index of an earlier version."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bent_models import BEYOND, bend_attention, spares_the_end
from support.reference import assert_close
from support.sealing import read_fields, seal
from support.small_index import (
    INDEXERS,
    TEXT,
    build_small,
    plain_logits,
    reopen,
    small_model,
    small_plan,
    with_changes,
    without_window,
)

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.errors import ArtifactError, IdentityError, SparsekvError
from sparsekv.formats.index.identity import SAMPLES_PER_TENSOR
from sparsekv.formats.index.manifest import read_manifest
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import MANIFEST, Manifest
from sparsekv.formats.models.load import identify
from sparsekv.indexing.append import adding_plan, encode_addition, growing_plan
from sparsekv.indexing.build import build_index
from sparsekv.indexing.convert import convert_index
from sparsekv.indexing.plan import BuildPlan
from sparsekv.indexing.prefill.prefills import KeyDiffPrefill

STORED: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {"prefill": KeyDiffPrefill(prefill_budget=40)},
    "int8": {"kv_dtype": "int8"},
}
ADDED = {"multipole": INDEXERS["multipole"]}


def _without_canary(folder: Path) -> None:
    """As an earlier version wrote it."""
    fields = read_fields(folder)
    fields["canary"] = []
    seal(folder, fields)


def _appended(folder: Path, plan: BuildPlan) -> BuildPlan:
    artifact = Artifact(folder)
    prompt = artifact.manifest.prompt
    addition = encode_addition(plan.loaded.tokenizer, "A line more.\n" * 3, prompt.chat, prompt.border)
    return growing_plan(artifact, plan.loaded, addition)


def _longer(folder: Path, plan: BuildPlan) -> BuildPlan:
    return replace(plan, prompt=small_plan(tokens=420).prompt)


GROWN: dict[str, Callable[[Path, BuildPlan], BuildPlan]] = {"append": _appended, "longer": _longer}


@pytest.mark.parametrize("grow", GROWN)
def test_rows_are_taken_over_for_the_model_that_made_them_alone(tmp_path: Path, grow: str) -> None:
    """The bend ends before the last token of the index, by which opening compares."""
    index = build_small(tmp_path / "doc.skv", tokens=300)
    before = (tmp_path / "doc.skv" / MANIFEST).read_bytes()
    plan = small_plan(tokens=300)
    bent = bend_attention(plan.loaded.model, "ending", spares_the_end)
    bent_plan = replace(plan, loaded=replace(plan.loaded, model=bent))
    reopen(bent_plan, tmp_path / "doc.skv")
    with pytest.raises(IdentityError, match=r"the canary \(logits of token .* other weights, or masks other tokens"):
        build_index(GROWN[grow](tmp_path / "doc.skv", bent_plan), tmp_path / "doc.skv")
    assert (tmp_path / "doc.skv" / MANIFEST).read_bytes() == before
    grown = build_index(GROWN[grow](tmp_path / "doc.skv", plan), tmp_path / "doc.skv")
    assert grown.split.tokens > index.split.tokens
    assert len(grown.canary) == 3


def test_int8_is_a_reason_for_another_canary_over_a_converted_index(tmp_path: Path) -> None:
    index = build_small(tmp_path / "doc.skv")
    convert_index(index.artifact, "int8", tmp_path / "int8.skv", torch.device("cpu"), lambda *_: None)
    fields = read_fields(tmp_path / "int8.skv")
    fields["canary"][1] |= {"token_ids": [0], "logits": [123.0]}
    seal(tmp_path / "int8.skv", fields)
    told = r"the canary .*; int8 storage changes this model's logits too much, or .*use the index that was converted"
    with pytest.raises(IdentityError, match=told):
        build_index(_longer(tmp_path / "int8.skv", small_plan(kv_dtype="int8")), tmp_path / "int8.skv")


@pytest.mark.parametrize("ids", [[10**6], [0]], ids=["unknown-token", "another"])
def test_a_canary_of_other_tokens_is_refused(tmp_path: Path, ids: list[int]) -> None:
    build_small(tmp_path / "doc.skv")
    fields = read_fields(tmp_path / "doc.skv")
    fields["canary"][1] |= {"token_ids": ids, "logits": [123.0]}
    seal(tmp_path / "doc.skv", fields)
    with pytest.raises(IdentityError, match="the canary"):
        build_index(_appended(tmp_path / "doc.skv", small_plan()), tmp_path / "doc.skv")


def _added_methods(folder: Path, plan: BuildPlan) -> Manifest:
    return build_index(adding_plan(Artifact(folder), plan.loaded, ADDED), folder)


def _built_onto(folder: Path, plan: BuildPlan) -> Manifest:
    return build_index(with_changes(plan, methods=ADDED), folder)


def _append(folder: Path, plan: BuildPlan) -> Manifest:
    return build_index(_appended(folder, plan), folder)


@pytest.mark.thinned
@pytest.mark.parametrize("change", [_added_methods, _built_onto, _append])
@pytest.mark.parametrize("how", ["dense", "sparse", "int8"])
def test_an_index_of_an_earlier_version_gets_a_canary(
    tmp_path: Path, change: Callable[[Path, BuildPlan], Manifest], how: str
) -> None:
    changes = STORED[how]
    plan = small_plan(**changes)
    build_small(tmp_path / "doc.skv", **changes)
    new = read_manifest(tmp_path / "doc.skv")
    _without_canary(tmp_path / "doc.skv")
    manifest = change(tmp_path / "doc.skv", plan)
    tokens = manifest.split.tokens
    assert [token.position for token in manifest.canary] == [tokens * part // 4 - 1 for part in (1, 2, 3)]
    index = reopen(plan, tmp_path / "doc.skv")
    if change is not _append:
        for before, after in zip([*new.canary, new.probe], [*manifest.canary, manifest.probe], strict=True):
            assert after.token_ids == before.token_ids
            assert_close(torch.tensor(after.logits), torch.tensor(before.logits), 1e-5)
    if how == "dense":
        plain = plain_logits(without_window("llama"), index.input_ids)
        for token in manifest.canary:
            assert_close(torch.tensor(token.logits), plain[token.position][token.token_ids], 1e-4)


@pytest.mark.parametrize("how", BEYOND)
def test_methods_of_a_bent_model_are_refused_in_an_index_of_an_earlier_version(tmp_path: Path, how: str) -> None:
    """Its bent rows and probe are the bent model's own, by our attention, so that opening finds no difference."""
    plan = small_plan()
    build_small(tmp_path / "doc.skv")
    _without_canary(tmp_path / "doc.skv")
    before = read_manifest(tmp_path / "doc.skv")
    bent = bend_attention(plan.loaded.model, f"later_{how}", BEYOND[how])
    with pytest.raises(SparsekvError, match="attends with a mask or a bias"):
        _built_onto(tmp_path / "doc.skv", replace(plan, loaded=replace(plan.loaded, model=bent)))
    assert read_manifest(tmp_path / "doc.skv") == before
    reopen(plan, tmp_path / "doc.skv")


@pytest.mark.parametrize("how", STORED)
def test_other_logits_over_the_same_rows_are_stored(tmp_path: Path, how: str) -> None:
    """Else a build says that an index is up to date which no command opens."""
    plan = small_plan("gemma2", **STORED[how])
    before = build_index(plan, tmp_path / "doc.skv")
    plan.loaded.model.config.final_logit_softcapping = 0.5
    told: list[str] = []
    after = build_index(plan, tmp_path / "doc.skv", tell=told.append)
    assert [line for line in told if "other logits" in line] == told != []
    assert (after.files, after.methods) == (before.files, before.methods)
    reopen(plan, tmp_path / "doc.skv")
    anew = build_index(plan, tmp_path / "new.skv")
    for stored, right in zip([*after.canary, after.probe], [*anew.canary, anew.probe], strict=True):
        assert_close(torch.tensor(stored.logits), torch.tensor(right.logits), 1e-5)
    assert build_index(plan, tmp_path / "doc.skv").uuid == after.uuid


def _with_other_weights(plan: BuildPlan) -> BuildPlan:
    """The plan with a model whose weights differ where the sample by which a model is known has none."""
    loaded = small_model()
    values = loaded.model.model.layers[1].mlp.down_proj.weight.data.view(-1)
    unsampled = torch.ones(len(values), dtype=torch.bool)
    unsampled[:: len(values) // SAMPLES_PER_TENSOR] = False
    values[unsampled] *= 3
    assert identify(loaded)[0] == identify(plan.loaded)[0]
    return replace(plan, loaded=loaded)


def _edited(plan: BuildPlan) -> BuildPlan:
    """The plan with a document that is edited after the first block, before all tokens of the canary."""
    text = TEXT[:280] + "edited" + TEXT[286:1200]
    return replace(plan, prompt=encode_prompt(plan.loaded.tokenizer, text))


class _Interrupted(BaseException):
    """Raised in the place of an interruption."""


def _interrupted(stage: str, done: int, of: int) -> None:
    if done > 600:
        raise _Interrupted


@pytest.mark.parametrize("case", ["same", "damaged", "edited", "edited-int8", "interrupted"])
def test_rows_of_other_weights_are_not_continued(tmp_path: Path, case: str) -> None:
    """Else an index has rows of two models, which opening does not notice."""
    plan = small_plan(tokens=1200, kv_dtype="int8" if case == "edited-int8" else None)
    if case == "interrupted":
        with pytest.raises(_Interrupted):
            build_index(plan, tmp_path / "doc.skv", _interrupted)
    else:
        build_index(plan, tmp_path / "doc.skv")
    if case == "damaged":
        (tmp_path / "doc.skv" / "context" / "layer_000.safetensors").unlink()
    other = _with_other_weights(_edited(plan) if "edited" in case else plan)
    with pytest.raises(ArtifactError, match=r"another model has computed them, .*, with --force"):
        build_index(other, tmp_path / "doc.skv")
    build_index(with_changes(other, force=True), tmp_path / "doc.skv")
    reopen(other, tmp_path / "doc.skv")
