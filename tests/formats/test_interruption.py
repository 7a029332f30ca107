"""A build that is killed at any point leaves the finished index as it was, and the next one resumes."""

import json
from functools import partial
from pathlib import Path

import pytest
from support.artifacts import assert_holds, assert_no_strays, files_in, small_artifact
from support.interrupted import interrupted_builds

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.manifest import JOURNAL
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import MANIFEST


def inodes(folder: Path, paths: set[str]) -> dict[str, int]:
    return {path: (folder / path).stat().st_ino for path in paths}


def journalled(folder: Path) -> set[str]:
    """Paths of the files that the journal in a folder lists as whole."""
    journal = folder / JOURNAL
    return (
        {record["path"] for record in json.loads(journal.read_bytes())["files"].values()} if journal.exists() else set()
    )


def test_a_first_build_is_whole_or_refused_then_resumed(tmp_path: Path) -> None:
    resumed_files = 0
    for folder in interrupted_builds(tmp_path, small_artifact):
        if (folder / MANIFEST).exists():
            assert_holds(folder)
        else:
            with pytest.raises(ArtifactError, match="build-index"):
                Artifact(folder)
        whole = inodes(folder, journalled(folder))
        small_artifact(folder)
        assert_holds(folder)
        assert_no_strays(folder)
        assert inodes(folder, set(whole)) == whole
        resumed_files += len(whole)
    assert resumed_files


@pytest.mark.parametrize(
    ("force", "every"), [(False, 1), (True, 4), pytest.param(True, 1, marks=pytest.mark.slow)], ids=str
)
def test_a_finished_index_stays_valid_until_another_takes_its_place(tmp_path: Path, force: bool, every: int) -> None:
    base, build = tmp_path / "base.skv", partial(small_artifact, context=1, method=1, force=force)
    small_artifact(base)
    outcomes = []
    for number, folder in enumerate(interrupted_builds(tmp_path / "killed", build, base, every=every)):
        replaced = Artifact(folder).manifest.uuid != Artifact(base).manifest.uuid
        outcomes.append(replaced)
        assert_holds(folder, context=int(replaced), method=int(replaced))
        # Back to the first build, resuming the second, or starting a third.
        wanted = number % 3
        small_artifact(folder, context=wanted, method=wanted)
        assert_holds(folder, context=wanted, method=wanted)
        assert_no_strays(folder)
    assert outcomes == sorted(outcomes)
    assert {False, True} == set(outcomes)


def test_a_method_that_is_built_anew_leaves_the_context_alone(tmp_path: Path) -> None:
    base = tmp_path / "base.skv"
    small_artifact(base)
    context = {path for path in files_in(base) if path.startswith("context/")}
    for folder in interrupted_builds(tmp_path / "killed", partial(small_artifact, method=1), base):
        assert_holds(folder, method=Artifact(folder).manifest.methods["squeezed"].seed)
        before = inodes(folder, context)
        small_artifact(folder, method=1)
        assert_holds(folder, method=1)
        assert_no_strays(folder)
        assert inodes(folder, context) == before
