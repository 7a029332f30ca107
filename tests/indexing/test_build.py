"""The build: resumed after an interruption, left alone when nothing changed, and never more than what changed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference import assert_close
from support.short_part import short_part
from support.small_index import TEXT, prefilled, recorded_attention, small_plan, with_changes
from support.tiny_models import FAMILIES, POSITIONS

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.errors import ArtifactError, SparsekvError, UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import MANIFEST, layer_file
from sparsekv.indexing.build import build_index
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.indexing.plan import BuildPlan


class _Killed(BaseException):
    """The exception that interrupts a build: no `except Exception` on the way may swallow it."""


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of each file of an index: both change when a file is written anew."""
    stats = {path: path.stat() for path in [*folder.rglob("*.safetensors"), *folder.glob(MANIFEST)]}
    return {str(path.relative_to(folder)): (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def _build_until(plan: BuildPlan, folder: Path, stage: str, done: int) -> None:
    def progress(now: str, so_far: int, of: int) -> None:
        if now == stage and so_far >= done:
            raise _Killed

    with pytest.raises(_Killed):
        build_index(plan, folder, progress)


def _assert_same_tensors(actual: Artifact, expected: Artifact, tolerance: float) -> None:
    """Contexts and queries of two indices agree; what is indexed then follows from them."""
    assert actual.manifest.files.keys() == expected.manifest.files.keys()
    for name in expected.manifest.files:
        tensors, others = actual.tensors(name), expected.tensors(name)
        assert tensors.keys() == others.keys()
        for key, other in others.items():
            if other.is_floating_point() and "centroids" not in key:
                assert_close(tensors[key], other, tolerance)
            else:
                assert tensors[key].shape == other.shape


def _tokens_run(plan: BuildPlan, folder: Path) -> int:
    """Build, and count the tokens that went through the model."""
    with recorded_attention(plan.loaded.model) as outputs:
        build_index(plan, folder)
    return prefilled(outputs)


@pytest.mark.parametrize(
    ("stage", "done"),
    short_part(
        [("prefill", 128), ("write context", 1), ("write context", 3), ("index squeezed", 1), ("index squeezed", 3)],
        every=2,
    ),
)
def test_an_interrupted_build_resumes_without_making_a_whole_file_again(stage: str, done: int, tmp_path: Path) -> None:
    plan, folder = small_plan(), tmp_path / "a.skv"
    _build_until(plan, folder, stage, done)
    finished = _files(folder)
    with pytest.raises(ArtifactError, match=r"manifest\.json is missing"):
        Artifact(folder)
    assert (_tokens_run(plan, folder) == 0) == (stage == "index squeezed" or done == 3)
    assert finished.items() <= _files(folder).items()
    build_index(plan, tmp_path / "b.skv")
    resumed, straight = Artifact(folder), Artifact(tmp_path / "b.skv")
    assert {name: file.sha256 for name, file in resumed.manifest.files.items()} == {
        name: file.sha256 for name, file in straight.manifest.files.items()
    }
    assert resumed.manifest.methods == straight.manifest.methods
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {".safetensors", ".json", ".lock", ""}


def test_a_build_tells_what_an_unfinished_one_has_left(tmp_path: Path) -> None:
    plan, folder, told = small_plan(), tmp_path / "a.skv", list[str]()
    _build_until(plan, folder, "index squeezed", 1)
    written = len(json.loads((folder / "unfinished.json").read_text())["files"])
    assert written > 1
    for _ in range(2):
        build_index(plan, folder, tell=told.append)
    assert told == [f"an unfinished build has left {written} files; those that fit this build are reused"]


def test_a_second_run_changes_nothing_at_all(tmp_path: Path) -> None:
    plan, folder = small_plan(), tmp_path / "a.skv"
    build_index(plan, folder)
    files = _files(folder)
    assert _tokens_run(plan, folder) == 0
    assert _files(folder) == files


def test_another_chunk_size_gives_the_index_that_is_there(tmp_path: Path) -> None:
    plan, folder = small_plan(), tmp_path / "a.skv"
    first = build_index(plan, folder)
    assert build_index(with_changes(plan, chunk_size=50), folder) == first


def test_force_makes_every_file_again(tmp_path: Path) -> None:
    plan, folder = small_plan(), tmp_path / "a.skv"
    first, before = build_index(plan, folder), _files(folder)
    again = build_index(with_changes(plan, force=True), folder)
    assert again.uuid != first.uuid
    assert not set(before.values()) & set(_files(folder).values())
    assert {file.sha256 for file in again.files.values()} == {file.sha256 for file in first.files.values()}


def test_an_edited_document_runs_only_what_comes_after_the_blocks_it_shares(tmp_path: Path) -> None:
    start, rest = TEXT[:600], TEXT[5000:5200]
    plan, edited = small_plan(text=TEXT, tokens=900), small_plan(text=start + rest, tokens=800)
    shared = len(plan.prompt.input_ids) - 900 + 600
    build_index(plan, tmp_path / "a.skv")
    assert _tokens_run(edited, tmp_path / "a.skv") == len(edited.prompt.input_ids) - shared // 256 * 256
    build_index(edited, tmp_path / "b.skv")
    updated, anew = Artifact(tmp_path / "a.skv"), Artifact(tmp_path / "b.skv")
    _assert_same_tensors(updated, anew, 1e-4)
    assert updated.manifest.probe.token_ids[0] == anew.manifest.probe.token_ids[0]
    assert updated.manifest.prompt == anew.manifest.prompt
    assert list(updated.verify())


def test_a_shortened_document_has_all_of_its_tails_queries(tmp_path: Path) -> None:
    """Its last tokens lie in blocks that it shares, and queries are not stored for tokens that were no tail before."""
    plan = small_plan(tokens=600)
    ids = plan.prompt.input_ids[:520]
    shortened = with_changes(plan, prompt=replace(plan.prompt, input_ids=ids))
    build_index(plan, tmp_path / "a.skv")
    assert _tokens_run(shortened, tmp_path / "a.skv") == plan.config.tail
    build_index(shortened, tmp_path / "b.skv")
    _assert_same_tensors(Artifact(tmp_path / "a.skv"), Artifact(tmp_path / "b.skv"), 1e-4)


def test_other_weights_replace_an_index_by_force_alone_and_reuse_nothing_of_it(tmp_path: Path) -> None:
    plan, folder = small_plan(), tmp_path / "a.skv"
    build_index(plan, folder)
    other = with_changes(plan, loaded=replace(plan.loaded, model=FAMILIES["llama"]()))
    with torch.no_grad():
        other.loaded.model.get_input_embeddings().weight.neg_()
    with pytest.raises(ArtifactError, match="is an index for another model, tiny-llama"):
        build_index(other, folder)
    assert _tokens_run(with_changes(other, force=True), folder) == len(plan.prompt.input_ids)


@pytest.mark.thinned
@pytest.mark.parametrize("named", [True, False], ids=["methods named", "methods kept"])
@pytest.mark.parametrize("moved", [{"sinks": 8}, {"tail": 32}, {"sinks": 5, "tail": 15}], ids=str)
def test_a_split_that_moves_takes_every_method_with_it(moved: dict[str, Any], named: bool, tmp_path: Path) -> None:
    plan, folder = small_plan(tokens=600), tmp_path / "a.skv"
    build_index(plan, folder)
    again = with_changes(plan, **moved, methods=plan.config.methods if named else {})
    assert _tokens_run(again, folder) == len(plan.prompt.input_ids) - 512
    artifact = Artifact(folder)
    split, tail = artifact.manifest.split, artifact.queries(0)["tail"]
    assert tail.shape[1] == split.tail == again.config.tail
    assert list(artifact.manifest.methods) == list(plan.config.methods)
    middle = torch.arange(split.sinks, split.sinks + split.middle, dtype=torch.int32)
    for layer in artifact.manifest.indexed_layers:
        order = artifact.method_tensors("squeezed", layer)["token_order"]
        assert torch.equal(order.sort(dim=1).values, middle.expand_as(order))


def test_a_method_that_is_not_named_stays_as_it_was(tmp_path: Path) -> None:
    plan, folder = small_plan(), tmp_path / "a.skv"
    first, before = build_index(plan, folder), _files(folder)
    assert build_index(with_changes(plan, methods={}), folder) == first
    assert _files(folder) == before


@pytest.mark.parametrize("change", [{"levels": (0.3,)}, {"seed": 1}, {"iterations": 2}], ids=str)
def test_another_parameter_of_a_method_makes_only_its_own_files_again(change: dict[str, Any], tmp_path: Path) -> None:
    plan, folder = small_plan(), tmp_path / "a.skv"
    first, before = build_index(plan, folder), _files(folder)
    changed = with_changes(plan, methods={"squeezed": replace(plan.config.methods["squeezed"], **change)})
    assert _tokens_run(changed, folder) == 0
    second, after = Artifact(folder).manifest, _files(folder)
    context = {name for name in before if name.startswith(("context", "queries", "tokens"))}
    assert all(before[name] == after[name] for name in context)
    assert not {before[name] for name in before.keys() - context} & set(after.values())
    assert second.parent_uuid == first.uuid
    assert second.methods["squeezed"].calibration != first.methods["squeezed"].calibration


def test_an_interrupted_update_leaves_the_earlier_index_whole(tmp_path: Path) -> None:
    plan, folder = small_plan(), tmp_path / "a.skv"
    first = build_index(plan, folder)
    changed = with_changes(plan, methods={"squeezed": SqueezedIndexer(levels=(0.3, 0.1))})
    _build_until(changed, folder, "index squeezed", 2)
    artifact = Artifact(folder)
    assert artifact.manifest == first
    assert list(artifact.verify()) == list(first.files)


def test_a_damaged_file_is_made_again_and_no_other(tmp_path: Path) -> None:
    plan, folder = small_plan(), tmp_path / "a.skv"
    build_index(plan, folder)
    before, damaged = _files(folder), folder / layer_file("squeezed", 1)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    told: list[str] = []
    build_index(plan, folder, tell=told.append)
    assert told == [f"squeezed/layer_001.safetensors of {folder} is missing or damaged: made again"]
    assert list(Artifact(folder).verify())
    after = _files(folder)
    unchanged = before.keys() - {layer_file("squeezed", 1), MANIFEST}
    assert all(before[name] == after[name] for name in unchanged)


@pytest.mark.parametrize("family", short_part(sorted(FAMILIES.keys() - {"mistral"}), every=2))
def test_layers_with_a_window_are_stored_and_not_indexed(family: str, tmp_path: Path) -> None:
    manifest = build_index(small_plan(family), tmp_path / "a.skv")
    sliding = {number for number, layer in enumerate(manifest.layers) if layer.sliding_window is not None}
    for number in range(len(manifest.layers)):
        assert layer_file("context", number) in manifest.files
        assert (layer_file("squeezed", number) in manifest.files) == (number not in sliding)
    assert manifest.indexed_layers == [n for n in range(len(manifest.layers)) if n not in sliding]


def test_a_model_whose_every_layer_slides_is_refused_by_name(tmp_path: Path) -> None:
    plan = small_plan("mistral")
    sliding = with_changes(plan, loaded=replace(plan.loaded, model=FAMILIES["mistral"]()))
    with pytest.raises(SparsekvError, match="every layer of tiny-mistral has a sliding window"):
        build_index(sliding, tmp_path / "a.skv")


def _refusal(plan: BuildPlan, folder: Path) -> str:
    with pytest.raises(UsageError) as refusal:
        build_index(plan, folder)
    assert not folder.exists()
    return str(refusal.value)


def test_a_document_without_a_middle_or_past_the_positions_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    plan = small_plan()
    short = with_changes(plan, sinks=len(plan.prompt.input_ids) - plan.config.tail)
    assert f"{len(plan.prompt.input_ids)} tokens" in _refusal(short, tmp_path / "a.skv")
    long = with_changes(plan, prompt=encode_prompt(plan.loaded.tokenizer, TEXT, max_tokens=POSITIONS + 1))
    assert f"{POSITIONS:,} positions" in _refusal(long, tmp_path / "a.skv")
    assert "--rope-scaling yarn:2" in _refusal(long, tmp_path / "a.skv")


@pytest.mark.parametrize("split", [{"sinks": 0}, {"tail": 1}, {"chunk_size": 0}], ids=str)
def test_a_split_or_chunk_that_makes_no_sense_is_refused(split: dict[str, Any]) -> None:
    name, value = next(iter(split.items()))
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} {value}"):
        small_plan(**split)


def test_the_smallest_middle_is_one_token(tmp_path: Path) -> None:
    plan = small_plan()
    smallest = with_changes(plan, sinks=len(plan.prompt.input_ids) - plan.config.tail - 1)
    manifest = build_index(smallest, tmp_path / "a.skv")
    assert manifest.split.middle == 1
    assert Artifact(tmp_path / "a.skv").method_tensors("squeezed", 0)["token_offsets"].tolist() == [[0, 1]] * 2


def test_a_bfloat16_model_makes_a_bfloat16_index(tmp_path: Path) -> None:
    plan = small_plan()
    plan.loaded.model.to(torch.bfloat16)
    build_index(plan, tmp_path / "a.skv")
    artifact = Artifact(tmp_path / "a.skv")
    assert artifact.manifest.dtype == "bfloat16"
    assert artifact.context(0)[0].dtype == artifact.queries(0)["tail"].dtype == torch.bfloat16


def test_another_ending_of_the_chat_template_is_taken_over(tmp_path: Path) -> None:
    """The ids of the prompt are the same, and nothing is prefilled; what comes after the question is not."""
    plan, folder = small_plan(), tmp_path / "a.skv"
    first = build_index(plan, folder)
    assert plan.prompt.chat is not None
    chat = plan.prompt.chat.model_copy(update={"after": "<|end|>\n"})
    second = build_index(with_changes(plan, prompt=replace(plan.prompt, chat=chat)), folder)
    assert second.prompt.chat == chat
    assert second.files == first.files
    assert Artifact(folder).manifest == second


def test_a_model_by_qwens_recipe_for_yarn_holds_more_than_its_config_names(tmp_path: Path) -> None:
    plan = small_plan(tokens=300)
    config = plan.loaded.model.config
    config.max_position_embeddings = 100
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    config.rope_parameters = config.rope_parameters | rope
    build_index(plan, tmp_path / "a.skv")
    assert len(Artifact(tmp_path / "a.skv").input_ids()) > 300 > config.max_position_embeddings
    with pytest.raises(UsageError) as error:
        build_index(small_plan(tokens=500, loaded=plan.loaded), tmp_path / "b.skv")
    assert "tokens, and tiny-llama has 400 positions; shorten it" in str(error.value)
    assert "--rope-scaling" not in str(error.value)
