"""Samples of a prompt's queries: which they are depends on positions alone, and an index takes over what it has."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close
from support.small_index import TEXT, prefilled, recorded_attention, small_plan, with_changes
from support.tiny_models import FAMILIES, VOCABULARY, tiny_tokenizer

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Split, layer_file
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.append import encode_addition, growing_plan
from sparsekv.indexing.build import Builder, build_index
from sparsekv.indexing.capture import rotation
from sparsekv.indexing.capture.capture import capture
from sparsekv.indexing.capture.rotation import queries_of_tokens
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.indexing.plan import BuildConfig, BuildPlan
from sparsekv.indexing.prefill.prefills import DensePrefill, Prefill, QuokaPrefill
from sparsekv.indexing.reuse import sample_positions

IDS = torch.randint(VOCABULARY, (150,), generator=torch.Generator().manual_seed(0))
TABLES = CSAttentionIndexer(subspace_size=8, centroids=4, iterations=2, query_sample=100)
FIRST, MORE = TEXT[:700], TEXT[700:850]


@settings(max_examples=40)
@given(sinks=st.integers(1, 9), middle=st.integers(1, 400), more=st.integers(0, 400), count=st.integers(0, 200))
def test_a_grown_documents_sample_is_of_the_old_one_and_of_new_tokens(
    sinks: int, middle: int, more: int, count: int
) -> None:
    old = sample_positions(Split(sinks=sinks, middle=middle, tail=8), count).tolist()
    grown = sample_positions(Split(sinks=sinks, middle=middle + more, tail=8), count).tolist()
    assert grown == sorted(set(grown))
    assert len(grown) == min(count, middle + more)
    assert all(sinks <= position < sinks + middle + more for position in grown)
    assert {position for position in grown if position < sinks + middle} <= set(old)


def test_a_sample_is_spread_over_the_middle() -> None:
    positions = sample_positions(Split(sinks=10, middle=10_000, tail=8), 1000)
    counts = torch.histc(positions.float(), 10, 10, 10_010)
    assert bool(((counts > 60) & (counts < 140)).all())


@pytest.mark.thinned
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_what_is_kept_are_the_queries_at_these_positions_wherever_chunks_end(family: str, chunk_size: int) -> None:
    model, positions = FAMILIES[family](), torch.tensor([0, 6, 7, 63, 64, 65, 149])
    every = capture(model, IDS, tail=len(IDS), chunk_size=len(IDS))
    some = capture(model, IDS, tail=5, positions=positions, chunk_size=chunk_size)
    for layer in range(model.config.num_hidden_layers):
        sample, facts = some.take(layer).sample, some.facts(layer)
        assert (sample is None) == (facts.sliding_window is not None)
        if sample is not None:
            assert_close(sample, every.take(layer).tail[:, positions], 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("chunk_size", "logit_bytes"), [(64, 1), (2, 2**28), (64, 2**28)])
def test_single_tokens_have_the_queries_of_a_whole_prefill(
    family: str, chunk_size: int, logit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "LOGIT_BYTES", logit_bytes)
    model, positions = FAMILIES[family](), torch.tensor([0, 6, 7, 63, 140])
    every = capture(model, IDS, tail=len(IDS))
    layers = [every.take(layer) for layer in range(model.config.num_hidden_layers)]
    queries = queries_of_tokens(
        model, IDS, positions, lambda layer: (layers[layer].keys[:, :141], layers[layer].values[:, :141]), chunk_size
    )
    full = [number for number in range(len(layers)) if every.facts(number).sliding_window is None]
    assert sorted(queries) == full
    for layer in full:
        assert_close(queries[layer], layers[layer].tail[:, positions], 1e-4)


def test_queries_of_a_prefix_that_is_not_run_are_asked_for() -> None:
    model, positions = FAMILIES["llama"](), torch.tensor([3, 50, 99, 100, 130])
    whole = capture(model, IDS, tail=5, positions=positions)
    rows = [whole.take(layer) for layer in range(3)]
    strangers = normal(0, 4, 3, 16)
    asked = []

    def prefix_queries(layer: int, at: torch.Tensor) -> torch.Tensor:
        asked.append((layer, at.tolist()))
        return strangers

    captured = capture(
        model,
        IDS,
        tail=5,
        positions=positions,
        chunk_size=20,
        prefix_tokens=100,
        prefix=lambda layer: (rows[layer].keys, rows[layer].values),
        prefix_queries=prefix_queries,
    )
    for layer in range(3):
        sample = captured.take(layer).sample
        assert sample is not None
        assert torch.equal(sample[:, :3], strangers)
        whole_sample = rows[layer].sample
        assert whole_sample is not None
        assert_close(sample[:, 3:], whole_sample[:, 3:], 1e-4)
    assert asked == [(layer, [3, 50, 99]) for layer in range(3)]


def _plan(text: str = FIRST, **changes: Any) -> BuildPlan:
    return with_changes(small_plan(text=text, tokens=len(text), methods={"csattention": TABLES}), **changes)


def _tokens_run(plan: BuildPlan, folder: Path) -> int:
    with recorded_attention(plan.loaded.model) as outputs:
        build_index(plan, folder)
    return prefilled(outputs)


def _inodes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_ino for path in folder.rglob("*.safetensors")}


def test_tables_for_an_index_without_samples_run_sampled_tokens_and_leave_the_rest_as_it_was(tmp_path: Path) -> None:
    plan, folder = _plan(), tmp_path / "a.skv"
    squeezed = {"squeezed": SqueezedIndexer(levels=(0.2,))}
    build_index(with_changes(plan, methods=squeezed), folder)
    before = _inodes(folder)
    assert not any(name.startswith("samples/") for name in before)
    # The last of them are not in a whole block of tokens, or run with it.
    shared = len(plan.prompt.input_ids) // 256 * 256
    sampled = sample_positions(plan.split(), 50)
    assert _tokens_run(plan, folder) == int((sampled < shared).sum()) + len(plan.prompt.input_ids) - shared
    after = _inodes(folder)
    assert before.items() <= after.items()
    assert {name.partition("/")[0] for name in after.keys() - before.keys()} == {"samples", "csattention"}
    assert Artifact(folder).manifest.methods.keys() == {"csattention", "squeezed"}
    # Now they are there: other tables run nothing, and a build that names no table keeps both.
    assert _tokens_run(with_changes(plan, methods={"csattention": replace(TABLES, alpha=0.5)}), folder) == 0
    assert _tokens_run(with_changes(plan, methods=squeezed), folder) == 0
    assert {"samples", "csattention"} <= {name.partition("/")[0] for name in Artifact(folder).manifest.files}
    assert list(Artifact(folder).verify())


def test_without_its_method_a_sample_goes(tmp_path: Path) -> None:
    plan, folder = _plan(), tmp_path / "a.skv"
    build_index(plan, folder)
    build_index(with_changes(plan, force=True, methods={"squeezed": SqueezedIndexer(levels=(0.2,))}), folder)
    assert not any(name.startswith(("samples/", "csattention/")) for name in _inodes(folder))


def test_a_sample_holds_the_queries_of_its_positions(tmp_path: Path) -> None:
    plan = _plan()
    build_index(plan, tmp_path / "a.skv")
    artifact = Artifact(tmp_path / "a.skv")
    every = capture(plan.loaded.model, plan.prompt.input_ids, tail=len(plan.prompt.input_ids))
    positions = sample_positions(artifact.manifest.split, 50)
    for layer in artifact.manifest.indexed_layers:
        sample = artifact.tensors(layer_file("samples", layer))
        assert torch.equal(sample["positions"], positions.int())
        assert_close(sample["queries"], every.take(layer).tail[:, positions], 1e-4)


@pytest.mark.parametrize("more", [MORE, TEXT[700:720]], ids=["past a block", "within the tail"])
def test_a_grown_index_has_the_sample_of_one_build_and_runs_only_what_is_new(more: str, tmp_path: Path) -> None:
    plan = _plan()
    first = build_index(plan, tmp_path / "a.skv")
    artifact = Artifact(tmp_path / "a.skv")
    centroids = artifact.method_tensors("csattention", 0)["centroids"].clone()
    addition = encode_addition(plan.loaded.tokenizer, more, None)
    grown = growing_plan(artifact, plan.loaded, addition)
    assert _tokens_run(grown, tmp_path / "a.skv") == len(grown.prompt.input_ids) - first.split.tokens // 256 * 256
    whole = with_changes(plan, prompt=replace(plan.prompt, input_ids=grown.prompt.input_ids))
    build_index(whole, tmp_path / "b.skv")
    for layer in range(3):
        actual, expected = (Artifact(tmp_path / f"{name}.skv").tensors(layer_file("samples", layer)) for name in "ab")
        assert torch.equal(actual["positions"], expected["positions"])
        assert_close(actual["queries"], expected["queries"], 1e-4)
    assert torch.equal(Artifact(tmp_path / "a.skv").method_tensors("csattention", 0)["centroids"], centroids)


@pytest.mark.parametrize("prefill", [DensePrefill(), QuokaPrefill(prefill_budget=24)], ids=["dense", "quoka"])
def test_an_edited_document_whose_sample_is_partly_known_runs_what_is_not(prefill: Prefill, tmp_path: Path) -> None:
    """A shorter middle samples more of each stretch. Queries that are not stored come from the rows before them, but
    not those of a sparse prefill, whose rows were selected for each chunk: it runs from the first of them."""
    build_index(_plan(prefill=prefill, chunk_size=20), tmp_path / "a.skv")
    shorter = _plan(FIRST[:420], prefill=prefill, chunk_size=20)
    split = shorter.split()
    old = set(sample_positions(_plan().split(), 50).tolist())
    unknown = [position for position in sample_positions(split, 50).tolist() if position not in old]
    shared = split.tokens // 256 * 256
    expected = split.tokens - shared + sum(position < shared for position in unknown)
    if not prefill.exact:
        expected = split.tokens - 1 - min(unknown) // 20 * 20  # the last token runs by itself
    assert _tokens_run(shorter, tmp_path / "a.skv") == expected
    build_index(shorter, tmp_path / "b.skv")
    for layer in range(3):
        actual, expected = (Artifact(tmp_path / f"{name}.skv").tensors(layer_file("samples", layer)) for name in "ab")
        assert_close(actual["queries"], expected["queries"], 1e-4)


def test_a_model_whose_tokens_need_those_before_them_runs_from_the_first_unknown_one(tmp_path: Path) -> None:
    """Llama 4 scales a query by how many tokens its cache has."""
    plan, folder = _plan(), tmp_path / "a.skv"
    plan.loaded.model.config.attn_temperature_tuning = True
    build_index(with_changes(plan, methods={"squeezed": SqueezedIndexer(levels=(0.2,))}), folder)
    first = int(sample_positions(plan.split(), 50)[0])
    assert _tokens_run(plan, folder) == len(plan.prompt.input_ids) - first


def test_a_damaged_sample_is_not_taken_over_into_a_longer_one(tmp_path: Path) -> None:
    plan, folder = _plan(), tmp_path / "a.skv"
    build_index(plan, folder)
    damaged = folder / layer_file("samples", 1)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    edited = _plan(FIRST[:600] + MORE)
    sampled, shared = sample_positions(edited.split(), 50), 600 // 256 * 256
    assert _tokens_run(edited, folder) == len(edited.prompt.input_ids) - shared + int((sampled < shared).sum())
    assert list(Artifact(folder).verify())


@pytest.mark.thinned
@pytest.mark.parametrize("folder", ["samples", "queries"])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "missing"])
def test_a_file_of_queries_that_is_gone_is_made_again(folder: str, cut: bool, tmp_path: Path) -> None:
    plan, index = _plan(), tmp_path / "a.skv"
    before = build_index(plan, index)
    file = index / layer_file(folder, 1)
    if cut:
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    assert _tokens_run(plan, index) < len(plan.prompt.input_ids)
    assert list(Artifact(index).verify())
    assert Artifact(index).manifest.files.keys() == before.files.keys()


def test_an_interrupted_build_goes_on_with_the_samples_it_has(tmp_path: Path) -> None:
    plan, folder = _plan(), tmp_path / "a.skv"

    def interrupt(stage: str, done: int, of: int) -> None:
        if stage == "write context" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(plan, folder, interrupt)
    before = _inodes(folder)
    assert {layer_file("samples", 0), layer_file("samples", 1)} <= before.keys()
    resumed, straight = build_index(plan, folder), build_index(plan, tmp_path / "b.skv")
    assert before.items() <= _inodes(folder).items()
    assert {name: file.sha256 for name, file in resumed.files.items()} == {
        name: file.sha256 for name, file in straight.files.items()
    }
    assert resumed.methods == straight.methods


def test_room_for_large_tables_is_asked_for_before_the_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    large = replace(TABLES, centroids=100_000, query_sample=65_536)
    plan = _plan(methods={"csattention": large})
    with pytest.raises(ArtifactError, match=r"needs \d+ MB") as refusal:
        build_index(plan, tmp_path / "a.skv")
    needed = int(str(refusal.value).partition("needs ")[2].partition(" MB")[0])
    tables = 3 * 2 * plan.split().middle * 6 * 2 * 100_000 * 0.25 / 1e6
    assert tables < needed < 1.02 * tables + 5


def test_what_a_method_is_built_of_depends_on_those_beside_it() -> None:
    """The sample is as large as any wants it, and each learns from all of it."""
    loaded = LoadedModel(FAMILIES["llama"](), tiny_tokenizer(), "tiny", None)
    codes, tables = CodesIndexer(), replace(TABLES, query_sample=4096)
    together = Builder(
        loaded, BuildConfig({"codes": codes, "csattention": tables, "multipole": MultipoleIndexer()}), {}
    )
    assert Builder(loaded, BuildConfig({"codes": codes}), {}).sample_of("codes") == {}
    assert together.sample_of("codes") == {"queries": 4096}
    assert together.sample_of("csattention") == together.sample_of("multipole") == together.sample_of("quest") == {}
