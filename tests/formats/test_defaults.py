"""The default setting of an index: written atomically, changing nothing else, and gone when the index is replaced."""

import json
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.artifacts import assert_holds, assert_no_strays, small_artifact, small_files, small_recipe
from support.interrupted import interrupted_builds

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.manifest import JOURNAL, read_manifest, write_defaults
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import MANIFEST, Defaults, Manifest, TuneTarget
from sparsekv.formats.index.writer import ArtifactWriter

SETTING = Defaults(
    method="squeezed",
    variant="flat",
    parameters={"lookup": "flat", "levels": [0.05, 0.01]},
    budget=0.25,
    layer_budgets={0: 0.1, 11: 0.4},
    residual=True,
    target=TuneTarget(measure="recall", value=0.9),
    calibration=0.91,
    held_out=0.895,
    kv_fraction=0.3125,
)
shares = st.floats(0, 1, exclude_min=True)


def write(folder: Path) -> Manifest:
    return write_defaults(folder, read_manifest(folder), SETTING)


@given(shares, st.none() | st.dictionaries(st.integers(0, 99), shares, max_size=4), st.booleans())
@settings(max_examples=30)
def test_a_setting_round_trips(budget: float, layers: dict[int, float] | None, residual: bool) -> None:
    setting = SETTING.model_copy(update={"budget": budget, "layer_budgets": layers, "residual": residual})
    assert Defaults.model_validate(json.loads(setting.model_dump_json())) == setting


def test_only_the_defaults_of_a_manifest_change(index: Path) -> None:
    before = read_manifest(index)
    sealed = write(index)
    assert read_manifest(index) == sealed
    assert sealed.defaults == SETTING
    assert sealed.manifest_sha256 != before.manifest_sha256
    same = {"defaults": None, "manifest_sha256": ""}
    assert sealed.model_copy(update=same) == before.model_copy(update=same)
    assert_holds(index)
    assert_no_strays(index)


def test_an_older_index_without_the_field_opens_and_takes_a_setting(index: Path) -> None:
    fields = json.loads((index / MANIFEST).read_bytes())
    del fields["defaults"], fields["manifest_sha256"]
    (index / MANIFEST).write_text(json.dumps({**fields, "manifest_sha256": hash_json(fields)}))
    assert Artifact(index).manifest.defaults is None
    write(index)
    assert Artifact(index).manifest.defaults == SETTING


def test_a_kill_leaves_the_manifest_before_or_after(tmp_path: Path) -> None:
    base = tmp_path / "base.skv"
    small_artifact(base)
    outcomes = []
    for folder in interrupted_builds(tmp_path / "killed", write, base, least=2):
        outcomes.append(Artifact(folder).manifest.defaults is not None)
        assert_holds(folder)
        write(folder)
        assert Artifact(folder).manifest.defaults == SETTING
        assert_no_strays(folder)
    assert outcomes == sorted(outcomes)
    assert False in outcomes


@pytest.mark.parametrize(
    ("force", "every"),
    [(False, 3), (True, 4), *(pytest.param(force, 1, marks=pytest.mark.slow) for force in (False, True))],
    ids=str,
)
def test_another_build_makes_an_index_without_defaults(tmp_path: Path, force: bool, every: int) -> None:
    """Wherever a build is killed, the setting exists as long as the index that it was measured on."""
    base, build = tmp_path / "base.skv", partial(small_artifact, context=1, method=1, force=force)
    small_artifact(base)
    uuid = write(base).uuid
    for folder in interrupted_builds(tmp_path / "killed", build, base, every=every):
        manifest = Artifact(folder).manifest
        assert manifest.defaults == (SETTING if manifest.uuid == uuid else None)
        build(folder)
        assert Artifact(folder).manifest.defaults is None


def test_a_build_that_changes_nothing_keeps_them(index: Path) -> None:
    write(index)
    with ArtifactWriter(index) as writer:
        reused = [writer.reuse(name, small_recipe(name, 0, 0)) for name in small_files()]
        assert all(reused)
        writer.leave_as_it_was()
    assert Artifact(index).manifest.defaults == SETTING


def test_what_an_interrupted_build_left_can_still_be_resumed(index: Path) -> None:
    name, tensors = next(iter(small_files(1).items()))
    recipe = small_recipe(name, 1, 0)
    with ArtifactWriter(index) as writer:
        writer.write(name, tensors, recipe)
    write(index)
    assert (index / JOURNAL).exists()
    with ArtifactWriter(index) as writer:
        assert writer.reuse(name, recipe)


def test_an_index_that_was_built_anew_meanwhile_is_left_alone(index: Path) -> None:
    measured = read_manifest(index)
    small_artifact(index, context=1)
    with pytest.raises(ArtifactError, match=r"another process changed .* while this command ran"):
        write_defaults(index, measured, SETTING)
    assert_holds(index, context=1)
    assert read_manifest(index).defaults is None


@pytest.fixture
def building(index: Path) -> Iterator[Path]:
    with ArtifactWriter(index):
        yield index


def test_a_build_that_runs_holds_the_lock(building: Path) -> None:
    with pytest.raises(ArtifactError, match="being built by another process"):
        write(building)
    assert read_manifest(building).defaults is None


def test_an_index_that_is_gone_is_not_made_again(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no index at"):
        write_defaults(tmp_path / "gone.skv", read_manifest(index), SETTING)
    assert not (tmp_path / "gone.skv").exists()


def test_a_manifest_that_cannot_be_written_stays(index: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(ArtifactError, match=r"cannot write .*: file too large; free space"):
            write(index)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_manifest(index).defaults is None
    assert_no_strays(index)
