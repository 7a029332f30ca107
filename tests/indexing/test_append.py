"""More tokens for an index on disk: what it then holds, and that no interruption or damage makes it wrong."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.artifacts import assert_no_strays
from support.interrupted import interrupted_builds
from support.reference import assert_close
from support.small_index import TEXT, prefilled, recorded_attention, small_plan, with_changes
from support.tiny_models import POSITIONS

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Manifest, RopeRecord, layer_file
from sparsekv.formats.models.load import LoadedModel, load_model
from sparsekv.indexing.append import copied_index, encode_addition, growing_plan, online_methods, stored_indexers
from sparsekv.indexing.build import build_index
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.indexing.methods.pqcache import PQCacheIndexer
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.indexing.plan import BuildConfig, BuildPlan
from sparsekv.kernels.kmeans.hierarchy import block_offsets
from sparsekv.runtime.reporting.recall import MeasuredQueries
from sparsekv.runtime.reporting.report import recall_report
from sparsekv.runtime.selection.interface import Budget

FIRST, MORE = TEXT[:600], TEXT[600:800]
MULTIPOLE = MultipoleIndexer(levels=(0.2, 0.06), block=64)


def _plan(family: str = "llama", text: str = FIRST) -> BuildPlan:
    return small_plan(family, text=text, tokens=len(text), methods={"multipole": MULTIPOLE})


def _grow(folder: Path, loaded: LoadedModel, text: str = MORE) -> Manifest:
    artifact = Artifact(folder)
    addition = encode_addition(loaded.tokenizer, text, artifact.manifest.prompt.chat, artifact.manifest.prompt.border)
    return build_index(growing_plan(artifact, loaded, addition), folder)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_grown_index_holds_what_building_both_texts_at_once_gives(family: str, tmp_path: Path) -> None:
    plan = _plan(family)
    first = build_index(plan, tmp_path / "a.skv")
    with recorded_attention(plan.loaded.model) as outputs:
        second = _grow(tmp_path / "a.skv", plan.loaded)
    build_index(_plan(family, f"{FIRST}\n\n{MORE}"), tmp_path / "b.skv")
    grown, whole = Artifact(tmp_path / "a.skv"), Artifact(tmp_path / "b.skv")
    assert prefilled(outputs) == second.split.tokens - first.split.tokens // 256 * 256
    assert torch.equal(grown.input_ids(), whole.input_ids())
    assert (second.split, second.layers, second.prompt.chat) == (
        whole.manifest.split,
        whole.manifest.layers,
        whole.manifest.prompt.chat,
    )
    assert second.parent_uuid == first.uuid
    assert second.prompt.text_sha256 not in (first.prompt.text_sha256, whole.manifest.prompt.text_sha256)
    assert second.methods["multipole"].parameters == first.methods["multipole"].parameters
    for layer in range(len(second.layers)):
        for actual, expected in zip(grown.context(layer), whole.context(layer), strict=True):
            assert_close(actual, expected, 1e-4)
        assert_close(grown.queries(layer)["tail"], whole.queries(layer)["tail"], 1e-4)
    for layer in second.indexed_layers:
        offsets = grown.method_tensors("multipole", layer)["block_offsets"]
        assert offsets.tolist() == block_offsets(second.split.middle, MULTIPOLE.block)
    assert len(list(grown.verify())) == len(second.files)
    assert_no_strays(tmp_path / "a.skv")


def test_a_document_that_has_the_appended_text_itself_has_no_addition(tmp_path: Path) -> None:
    """Its lines are counted through, and a change of it is not refused as a loss of appended text."""
    folder, whole = tmp_path / "a.skv", _plan(text=f"{FIRST}\n\n{MORE}")
    build_index(_plan(), folder)
    grown = _grow(folder, whole.loaded)
    again = build_index(whole, folder)
    assert again.prompt.ids_sha256 == grown.prompt.ids_sha256
    assert again.prompt == build_index(whole, tmp_path / "b.skv").prompt
    assert (len(grown.additions), again.additions) == (1, [])
    assert build_index(_plan(text=f"{FIRST}\n\n{MORE} More."), folder).split.tokens > again.split.tokens


def test_a_text_that_was_cut_stays_one_when_more_follows(tmp_path: Path) -> None:
    """`inspect` says where, and names no text as whole of which a part was left out."""
    plan = small_plan(tokens=300)
    build_index(plan, tmp_path / "a.skv")
    assert _grow(tmp_path / "a.skv", plan.loaded).prompt.max_tokens == 300


def test_codes_learn_again_each_time_the_text_has_grown_by_a_quarter(tmp_path: Path) -> None:
    """Until then their codebooks stay, and the codes that they gave."""
    folder, codes = tmp_path / "a.skv", CodesIndexer(code_bytes=4, iterations=2)
    plan = small_plan(text=FIRST, tokens=len(FIRST), methods={"codes": codes})
    build_index(plan, folder)
    for added, learn in ((100, False), (60, True), (100, False), (400, True)):
        before = Artifact(folder).method_tensors("codes", 0)
        _grow(folder, plan.loaded, TEXT[-added:])
        after = Artifact(folder).method_tensors("codes", 0)
        assert torch.equal(after["codebooks"], before["codebooks"]) is not learn
        assert torch.equal(after["codes"][:, : before["codes"].shape[1]], before["codes"]) is not learn
        assert after["codes"].shape[1] == Artifact(folder).manifest.split.middle


def test_a_method_that_takes_no_tokens_is_made_again_from_all_of_them(tmp_path: Path) -> None:
    coded = PQCacheIndexer(pq_bytes=4, iterations=2)
    of_codes = CodesIndexer(levels=(0.1,), code_bytes=4, iterations=2, query_sample=64)
    methods = {"squeezed": SqueezedIndexer(levels=(0.2,)), "multipole": MULTIPOLE, "pqcache": coded, "codes": of_codes}
    plan = with_changes(_plan(), methods=methods)
    first = build_index(plan, tmp_path / "a.skv")
    assert online_methods(first) == {"multipole", "pqcache", "codes"}
    books = Artifact(tmp_path / "a.skv").method_tensors("pqcache", 0)["codebooks"].clone()
    assert stored_indexers(first) == plan.config.methods
    grown = _grow(tmp_path / "a.skv", plan.loaded, MORE[:100])
    order = Artifact(tmp_path / "a.skv").method_tensors("squeezed", 0)["token_order"]
    middle = torch.arange(grown.split.sinks, grown.split.sinks + grown.split.middle, dtype=torch.int32)
    assert torch.equal(order.sort(dim=1).values, middle.expand_as(order))
    codes = Artifact(tmp_path / "a.skv").method_tensors("pqcache", 0)
    assert torch.equal(codes["codebooks"], books)
    assert codes["codes"].shape[1] == grown.split.middle > first.split.middle
    assert grown.methods["squeezed"].parameters == first.methods["squeezed"].parameters
    assert grown.methods["squeezed"].calibration != first.methods["squeezed"].calibration


def test_no_method_goes_on_online_where_the_keys_depend_on_the_prompts_length(tmp_path: Path) -> None:
    first = build_index(_plan(), tmp_path / "a.skv")
    for rope in ({"rope_type": "longrope"}, {"full_attention": {"rope_type": "dynamic"}}):
        assert online_methods(first.model_copy(update={"rope": RopeRecord(parameters=rope)})) == frozenset()


def test_a_method_of_an_earlier_revision_is_made_again_from_all_tokens(tmp_path: Path) -> None:
    plan = with_changes(
        _plan(), methods={"codes": CodesIndexer(levels=(0.1,), code_bytes=4, iterations=2, query_sample=64)}
    )
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr(CodesIndexer, "revision", 1)
        first = build_index(plan, tmp_path / "a.skv")
    assert (first.methods["codes"].revision, CodesIndexer.revision) == (1, 4)
    assert online_methods(first) == frozenset()
    grown = _grow(tmp_path / "a.skv", plan.loaded, MORE[:100])
    assert grown.methods["codes"].revision == 4
    assert online_methods(grown) == {"codes"}


def test_a_method_of_another_revision_is_refused(tmp_path: Path) -> None:
    first = build_index(_plan(), tmp_path / "a.skv")
    record = first.methods["multipole"].model_copy(update={"revision": 99})
    with pytest.raises(ArtifactError, match=r"method multipole was built by another version .*--force"):
        stored_indexers(first.model_copy(update={"methods": {"multipole": record}}))


def test_a_method_that_is_not_installed_is_named(tmp_path: Path) -> None:
    first = build_index(_plan(), tmp_path / "a.skv")
    unknown = {"unheard-of": first.methods["multipole"]}
    with pytest.raises(ArtifactError, match="has the method unheard-of, which is not installed; install its package"):
        stored_indexers(first.model_copy(update={"methods": unknown}))


def _keep_layers(loaded: LoadedModel, layers: int) -> None:
    stack = loaded.model.base_model.layers
    assert isinstance(stack, torch.nn.ModuleList)
    del stack[layers:]
    loaded.model.config.num_hidden_layers = layers


def _one_layer() -> LoadedModel:
    loaded = _plan().loaded
    _keep_layers(loaded, 1)
    return loaded


# Of some 93 operations four lie between the last file of the method and the new manifest. A stride of 2 meets these
# four, even if threads of a busy machine do two operations more or less before them.
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_an_index_that_is_killed_while_it_grows_is_the_old_one_or_the_new_one(tmp_path: Path, every: int) -> None:
    loaded, base = _one_layer(), tmp_path / "base.skv"
    first = build_index(with_changes(_plan(), loaded=loaded), base)
    shutil.copytree(base, tmp_path / "straight.skv")
    sums = _sums(_grow(tmp_path / "straight.skv", loaded))
    outcomes, resumed = [], 0
    for folder in interrupted_builds(tmp_path / "killed", partial(_grow, loaded=loaded), base, every=every):
        artifact = Artifact(folder)
        assert len(list(artifact.verify())) == len(first.files)
        outcomes.append(artifact.manifest.uuid != first.uuid)
        if outcomes[-1]:
            assert _sums(artifact.manifest) == sums
            continue
        grown = folder / f"multipole/layer_000.{_grown_recipe(tmp_path / 'straight.skv')}.safetensors"
        written = grown.stat().st_ino if grown.exists() else None
        assert _sums(_grow(folder, loaded)) == sums
        assert_no_strays(folder)
        resumed += written == grown.stat().st_ino
    # Whether a file is read again depends on whether a thread has written it by then: two operations more, or less.
    last_old, first_new = len(outcomes) - 1 - outcomes[::-1].index(False), outcomes.index(True)
    assert last_old < first_new + 4 / every
    assert resumed


def _sums(manifest: Manifest) -> dict[str, str]:
    return {name: record.sha256 for name, record in manifest.files.items()}


def _grown_recipe(folder: Path) -> str:
    return Artifact(folder).manifest.files[layer_file("multipole", 0)].recipe[:8]


def test_an_index_that_another_process_changed_is_left_alone(tmp_path: Path) -> None:
    plan = _plan()
    build_index(plan, tmp_path / "a.skv")
    artifact = Artifact(tmp_path / "a.skv")
    late = growing_plan(artifact, plan.loaded, encode_addition(plan.loaded.tokenizer, "late", None))
    grown = _grow(tmp_path / "a.skv", plan.loaded)
    with pytest.raises(ArtifactError, match=r"another process changed .*a\.skv while this command ran"):
        build_index(late, tmp_path / "a.skv")
    assert Artifact(tmp_path / "a.skv").manifest == grown


def _flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damage_never_gets_a_sum_of_its_own(tmp_path: Path) -> None:
    """Neither by growing, which is refused, nor by an edit, which computes everything anew."""
    plan = _plan()
    build_index(plan, tmp_path / "a.skv")
    _flip_last_byte(tmp_path / "a.skv" / layer_file("context", 1))
    with pytest.raises(ArtifactError, match=r"context/layer_001.* is damaged"):
        _grow(tmp_path / "a.skv", plan.loaded)
    edited = _plan(text=FIRST[:500] + MORE)
    with recorded_attention(plan.loaded.model) as outputs:
        build_index(with_changes(edited, loaded=plan.loaded), tmp_path / "a.skv")
    assert prefilled(outputs) == len(edited.prompt.input_ids)


def test_more_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    plan = _plan()
    first = build_index(plan, tmp_path / "a.skv")
    tokens = first.split.tokens + 2 + POSITIONS
    with pytest.raises(UsageError, match=rf"have {tokens:,} tokens .* {POSITIONS:,} positions; append less"):
        _grow(tmp_path / "a.skv", plan.loaded, "x" * POSITIONS)
    assert Artifact(tmp_path / "a.skv").manifest == first


def test_a_copy_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    plan = _plan()
    first = build_index(plan, tmp_path / "a.skv")
    artifact = Artifact(tmp_path / "a.skv")

    def copy_and_fail() -> None:
        with copied_index(artifact, tmp_path / "b.skv") as copy:
            assert Artifact(copy).manifest == first
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_and_fail()
    assert [path.name for path in tmp_path.iterdir()] == ["a.skv"]
    with copied_index(artifact, tmp_path / "b.skv") as copy:
        grown = _grow(copy, plan.loaded)
    assert Artifact(tmp_path / "b.skv").manifest == grown
    assert Artifact(tmp_path / "a.skv").manifest == first
    assert len(list(Artifact(tmp_path / "a.skv").verify())) == len(first.files)
    with (
        pytest.raises(ArtifactError, match=r"cannot write .*b\.skv: directory not empty"),
        copied_index(artifact, tmp_path / "b.skv"),
    ):
        pass


def test_recall_after_growing_is_nearly_that_of_one_build(embedded_folder: Path, tmp_path: Path) -> None:
    """A third more tokens for an open block of the real model, of which four layers are enough."""
    loaded = load_model(str(embedded_folder), device="cpu", dtype="float32")
    _keep_layers(loaded, 4)
    prompt = encode_prompt(loaded.tokenizer, TEXT, max_tokens=1152)
    whole = BuildPlan(loaded, prompt, BuildConfig({"multipole": MultipoleIndexer(block=768)}, tail=64))
    start = with_changes(whole, prompt=replace(prompt, input_ids=prompt.input_ids[:-384]))
    build_index(whole, tmp_path / "whole.skv")
    build_index(start, tmp_path / "grown.skv")
    artifact = Artifact(tmp_path / "grown.skv")
    rest = replace(encode_addition(loaded.tokenizer, "", prompt.chat), input_ids=prompt.input_ids[-384:])
    build_index(growing_plan(artifact, loaded, rest), tmp_path / "grown.skv")
    assert _recall(tmp_path / "grown.skv") >= _recall(tmp_path / "whole.skv") - 0.02


def _recall(folder: Path) -> float:
    artifact = Artifact(folder)
    report = recall_report(artifact, ["multipole"], [Budget(0.1)], MeasuredQueries(artifact))
    return next(row.recall for row in report.by() if row.variant == "flat")
