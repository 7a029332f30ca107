"""Builds that store keys and values in 8 bits: what is measured, reused, resumed and taken over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.earlier_forms import in_blocks
from support.reference import assert_close
from support.sealing import change_tensors
from support.short_part import short_part
from support.small_index import INDEXERS, TEXT, prefilled, recorded_attention, reopen, small_plan, with_changes

from sparsekv.formats.index.context_rows import OF_CHANNELS, quantise
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import LayerFacts, Manifest, layer_file
from sparsekv.indexing.append import encode_addition, growing_plan
from sparsekv.indexing.build import build_index
from sparsekv.indexing.context_files import storing_error
from sparsekv.indexing.plan import BuildPlan
from sparsekv.kernels.attention.attention import Segment, attend, causal_mask


class _Killed(BaseException):
    """The exception that interrupts a build: no `except Exception` on the way may swallow it."""


def _int8(**changes: Any) -> BuildPlan:
    return small_plan(kv_dtype="int8", **changes)


def _sums(manifest: Manifest) -> dict[str, tuple[str, str]]:
    return {name: (file.sha256, file.recipe) for name, file in manifest.files.items()}


def _tokens_run(plan: BuildPlan, folder: Path) -> int:
    with recorded_attention(plan.loaded.model) as outputs:
        build_index(plan, folder)
    return prefilled(outputs)


def _edited(start: int, rest: int, **changes: Any) -> BuildPlan:
    return small_plan(text=TEXT[:start] + TEXT[5000 : 5000 + rest], tokens=start + rest, **changes)


def test_what_is_stored_is_what_was_captured_in_8_bits(tmp_path: Path) -> None:
    exact, stored = small_plan(), _int8()
    build_index(exact, tmp_path / "a.skv")
    manifest = build_index(stored, tmp_path / "b.skv")
    for layer in range(len(manifest.layers)):
        tensors = Artifact(tmp_path / "b.skv").tensors(layer_file("context", layer))
        expected = quantise(*Artifact(tmp_path / "a.skv").context(layer))
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], rows) for name, rows in expected.items())


def test_the_cost_of_storing_is_the_error_of_dense_attention_over_what_is_stored(tmp_path: Path) -> None:
    """Per layer, by a definition of its own in float64."""
    build_index(small_plan("gemma2"), tmp_path / "a.skv")
    manifest = build_index(small_plan("gemma2", kv_dtype="int8"), tmp_path / "b.skv")
    exact, stored = Artifact(tmp_path / "a.skv"), Artifact(tmp_path / "b.skv")
    assert manifest.kv_storage is not None
    assert manifest.kv_storage.measured_tokens == manifest.split.tokens
    assert manifest.kv_storage.measured_ids == manifest.prompt.ids_sha256
    for layer, facts in enumerate(manifest.layers):
        queries = exact.queries(layer)["tail"]
        right, there = (_output(queries, index.context(layer), facts) for index in (exact, stored))
        error = ((there - right).norm(dim=-1) / right.norm(dim=-1)).mean()
        assert manifest.kv_storage.errors[layer] == pytest.approx(float(error), rel=1e-3)
        assert 0 < manifest.kv_storage.errors[layer] < 0.1


def _output(queries: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], facts: LayerFacts) -> torch.Tensor:
    """[Hk, G, R, D]: attention of the prompt's last queries, in float64."""
    keys, values = (of.double()[:, None] for of in rows)
    grouped = queries.double().unflatten(0, (len(keys), -1))
    logits = grouped @ keys.transpose(-1, -2) * facts.softmax_scale
    if facts.softcap is not None:
        logits = facts.softcap * (logits / facts.softcap).tanh()
    tokens = keys.shape[2]
    seen = causal_mask(queries.shape[1], tokens, facts.sliding_window, queries.device)
    return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ values


def test_the_cost_counts_learned_sinks_and_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values, queries = (torch.randn(2, 90, 8, generator=generator) for _ in range(3))
    facts = LayerFacts(softmax_scale=0.4, softcap=None, sliding_window=None, attention_sinks=True)
    tensors, sinks = quantise(keys, values), torch.tensor([0.5, 3.0])
    whole = storing_error(queries[:, :20], (keys, values), tensors, facts, sinks)
    with monkeypatch.context() as patch:
        patch.setattr("sparsekv.indexing.context_files.LOGITS_AT_ONCE", 2 * 90 * 3)
        assert storing_error(queries[:, :20], (keys, values), tensors, facts, sinks) == pytest.approx(whole, rel=1e-5)
    mask = causal_mask(20, 90, None, torch.device("cpu"))
    with_sinks = attend(queries[:, None, :20], [Segment(keys, values, mask)], 0.4, None, sinks[:, None])
    assert with_sinks.norm() < attend(queries[:, None, :20], [Segment(keys, values, mask)], 0.4).norm()


@pytest.mark.parametrize("text", ["exact", "zero values"])
def test_rows_that_lose_nothing_cost_nothing(text: str) -> None:
    keys, values = torch.ones(2, 70, 4), torch.ones(2, 70, 4) * (text == "exact")
    facts = LayerFacts(softmax_scale=0.5, softcap=None, sliding_window=None, attention_sinks=False)
    assert storing_error(torch.ones(4, 3, 4), (keys, values), quantise(keys, values), facts, None) < 0.004


@pytest.mark.parametrize(
    ("stage", "done"),
    short_part(
        [("prefill", 128), ("write context", 1), ("write context", 3), ("index codes", 1), ("index multipole", 3)],
        every=2,
    ),
)
def test_a_build_that_was_interrupted_is_the_one_that_was_not(stage: str, done: int, tmp_path: Path) -> None:
    """With what storing costs, which only the exact rows can tell."""
    plan = _int8(methods={name: INDEXERS[name] for name in ("codes", "multipole")})
    straight = build_index(plan, tmp_path / "b.skv")

    def progress(now: str, so_far: int, of: int) -> None:
        if now == stage and so_far >= done:
            raise _Killed

    with pytest.raises(_Killed):
        build_index(plan, tmp_path / "a.skv", progress)
    resumed = build_index(plan, tmp_path / "a.skv")
    assert _sums(resumed) == _sums(straight)
    assert (resumed.kv_storage, resumed.methods) == (straight.kv_storage, straight.methods)
    assert build_index(plan, tmp_path / "a.skv") == resumed


def test_an_index_of_exact_rows_and_one_in_8_bits_do_not_share_files(tmp_path: Path) -> None:
    first = build_index(small_plan(), tmp_path / "a.skv")
    second = build_index(_int8(), tmp_path / "a.skv")
    assert second.kv_storage is not None
    third = build_index(small_plan(), tmp_path / "a.skv")
    assert third.kv_storage is None
    assert _sums(third) == _sums(first)


def test_a_build_in_8_bits_begins_with_the_exact_rows_of_the_index_that_is_there(tmp_path: Path) -> None:
    """The exact rows cost nothing, so the error of storing rows in 8 bits is measured on all of them."""
    build_index(small_plan(tokens=600), tmp_path / "a.skv")
    plan = _int8(tokens=600)
    assert _tokens_run(plan, tmp_path / "a.skv") == len(plan.prompt.input_ids) - 512
    straight, grown = build_index(plan, tmp_path / "b.skv"), Artifact(tmp_path / "a.skv").manifest
    assert straight.kv_storage is not None
    assert grown.kv_storage is not None
    assert grown.kv_storage.measured_ids == grown.prompt.ids_sha256
    assert grown.kv_storage.errors == pytest.approx(straight.kv_storage.errors, rel=0.05)


def test_an_edited_document_keeps_the_numbers_of_the_tokens_that_it_shares(tmp_path: Path) -> None:
    """Restored and rounded again they would be other numbers, and further off."""
    before = build_index(_int8(tokens=700), tmp_path / "a.skv")
    old = [dict(Artifact(tmp_path / "a.skv").tensors(layer_file("context", layer))) for layer in range(3)]
    edited = _edited(600, 200, kv_dtype="int8")
    frame = len(_int8(tokens=700).prompt.input_ids) - 700
    shared = (frame + 600) // 256 * 256
    assert _tokens_run(edited, tmp_path / "a.skv") == len(edited.prompt.input_ids) - shared
    after = Artifact(tmp_path / "a.skv")
    for layer in range(3):
        new = after.tensors(layer_file("context", layer))
        for name, rows in old[layer].items():
            same = rows.shape[1] if name in OF_CHANNELS else shared
            assert torch.equal(new[name][:, :same], rows[:, :same])
    # Exact rows of the shared tokens were not there: what was measured is the earlier text's.
    assert after.manifest.kv_storage == before.kv_storage
    build_index(edited, tmp_path / "b.skv")
    for layer in range(3):
        for found, anew in zip(after.context(layer), Artifact(tmp_path / "b.skv").context(layer), strict=True):
            assert_close(found, anew, 0.1)


@pytest.mark.parametrize(("tokens", "taken"), [(560, 256), (680, 0)], ids=["half of it", "less than half"])
def test_a_longer_document_takes_over_no_scales_of_a_few_of_its_tokens(tmp_path: Path, tokens: int, taken: int) -> None:
    """The scales of a few tokens would fit the other keys badly."""
    build_index(_int8(tokens=300), tmp_path / "a.skv")
    longer = _int8(tokens=tokens)
    assert _tokens_run(longer, tmp_path / "a.skv") == len(longer.prompt.input_ids) - taken


def test_a_damaged_file_is_made_again_with_the_rows_that_have_its_scales(tmp_path: Path) -> None:
    """Otherwise the index would have scales of two texts, and the probe would be of rows that it does not store."""
    folder, plan = tmp_path / "a.skv", _int8(tokens=500, text=TEXT[:250] + TEXT[5000:5250], family="gemma2")
    build_index(_int8(tokens=300, family="gemma2"), folder)
    build_index(plan, folder)  # goes on with the scales of the shorter text
    (folder / Artifact(folder).manifest.files[layer_file("context", 1)].path).unlink()
    build_index(plan, folder)
    reopen(plan, folder)
    build_index(plan, tmp_path / "b.skv")
    assert _sums(Artifact(folder).manifest) == _sums(Artifact(tmp_path / "b.skv").manifest)


@pytest.mark.parametrize("written", [1, 3])
def test_files_of_an_interrupted_force_are_not_mixed_with_those_it_was_to_replace(tmp_path: Path, written: int) -> None:
    """Their scales are not those of the index, which are those of a shorter text."""
    folder, plan = tmp_path / "a.skv", _int8(tokens=500, text=TEXT[:250] + TEXT[5000:5250])
    build_index(_int8(tokens=300), folder)
    build_index(plan, folder)

    def stop(stage: str, done: int, of: int) -> None:
        if (stage, done) == ("write context", written):
            raise _Killed

    with pytest.raises(_Killed):
        build_index(with_changes(plan, force=True), folder, stop)
    build_index(plan, folder)
    reopen(plan, folder)


def test_a_shared_prefix_ends_at_any_token(tmp_path: Path) -> None:
    """A shortened document's prefix ends where its tail begins."""
    build_index(_int8(tokens=600), tmp_path / "a.skv")
    plan = _int8(tokens=600)
    shortened = with_changes(plan, prompt=replace(plan.prompt, input_ids=plan.prompt.input_ids[:520]))
    old = dict(Artifact(tmp_path / "a.skv").tensors(layer_file("context", 1)))
    assert _tokens_run(shortened, tmp_path / "a.skv") == plan.config.tail
    kept = 520 - plan.config.tail
    for name, rows in Artifact(tmp_path / "a.skv").tensors(layer_file("context", 1)).items():
        same = rows.shape[1] if name in OF_CHANNELS else kept
        assert torch.equal(rows[:, :same], old[name][:, :same])


def test_rows_of_an_earlier_form_are_neither_reused_nor_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if no index were there: of the same document, which would find its files whole, and of an edited one."""
    for plan in (_int8(tokens=300), _edited(270, 20, kv_dtype="int8")):
        folder, anew = tmp_path / f"{len(plan.prompt.input_ids)}.skv", tmp_path / f"{len(plan.prompt.input_ids)}b.skv"
        with monkeypatch.context() as patch:
            patch.setattr("sparsekv.indexing.context_files.FORM", "earlier")
            build_index(_int8(tokens=300), folder)
        for layer in range(3):
            change_tensors(folder, layer_file("context", layer), in_blocks)
        assert _tokens_run(plan, folder) == len(plan.prompt.input_ids)
        build_index(plan, anew)
        assert _sums(Artifact(folder).manifest) == _sums(Artifact(anew).manifest)


def test_rounded_rows_never_pass_for_exact_ones(tmp_path: Path) -> None:
    build_index(_int8(tokens=300), tmp_path / "a.skv")
    plan = _edited(270, 20)
    assert _tokens_run(plan, tmp_path / "a.skv") == len(plan.prompt.input_ids)
    build_index(plan, tmp_path / "b.skv")
    assert _sums(Artifact(tmp_path / "a.skv").manifest) == _sums(Artifact(tmp_path / "b.skv").manifest)


def test_text_is_appended_in_8_bits_and_keeps_what_was_measured(tmp_path: Path) -> None:
    folder, plan = tmp_path / "a.skv", _int8(tokens=300, methods={"multipole": INDEXERS["multipole"]})
    before = build_index(plan, folder)
    old = {name: rows.clone() for name, rows in Artifact(folder).tensors(layer_file("context", 1)).items()}
    for text in ("Some more text, which follows.", "And more of it again."):
        artifact = Artifact(folder)
        addition = encode_addition(plan.loaded.tokenizer, text, artifact.manifest.prompt.chat)
        build_index(growing_plan(artifact, plan.loaded, addition), folder)
    after = Artifact(folder)
    assert after.manifest.split.tokens > before.split.tokens
    assert after.manifest.kv_storage == before.kv_storage
    for name, rows in after.tensors(layer_file("context", 1)).items():
        same = rows.shape[1] if name in OF_CHANNELS else 256
        assert torch.equal(rows[:, :same], old[name][:, :same])
