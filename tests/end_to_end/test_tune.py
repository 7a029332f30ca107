"""A tuned index of a real document: its target holds on queries that the search did not see, and answers use it."""

import json
import shutil
from pathlib import Path

import pytest
from support.command import sparsekv

from sparsekv.formats.index.reader import Artifact


@pytest.mark.slow
def test_a_tuned_index_holds_its_target(index: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "tuned.skv"
    shutil.copytree(index.folder, folder)
    methods = ("--method", "squeezed", "--method", "multipole", "--method", "quest")
    done = sparsekv("tune", "-i", folder, "--target-recall", "0.8", *methods, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["methods"][0]
    assert best["calibration"] >= 0.8
    assert best["held_out"] >= 0.78
    assert best["kv_fraction"] < 1
    answer = sparsekv("generate", "-i", folder, "What is a statement?", "--json", "--max-new-tokens", "8", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert (told["method"], told["budget"]) == (best["method"], best["budget"])
    assert told["kv_fraction"] == pytest.approx(best["kv_fraction"], abs=0.1)
    assert Artifact(folder).manifest.defaults is not None
