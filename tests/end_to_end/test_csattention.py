"""Query-centric tables of the real model on the first 6,144 tokens of a real document: the paper's setting and ours."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command import sparsekv

from sparsekv.formats.index.reader import Artifact

PAPER = ("--subspace-size", "8", "--subspaces", "contiguous", "--alpha", "0.25", "--centroids", "128")
pytestmark = pytest.mark.slow


def _rows(index: Artifact, folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Rows of a report at 5% by variant, for a copy of an index to which tables are added."""
    shutil.copytree(index.folder, folder)
    command = ("build-index", index.folder.parent / "topics.txt", "-o", folder, "--max-tokens", "6144")
    done = sparsekv(*command, "--method", "csattention", *options, "-q", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    command = ("recall-report", "-i", folder, "--method", "csattention", "--budget", "5%", "--residual", "--json")
    done = sparsekv(*command, "-q", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return {row["variant"]: row for row in json.loads(done.stdout)["rows"]}


def test_eight_subspaces_recall_by_what_missing_keys_count_as(long_index: Artifact, tmp_path: Path) -> None:
    rows = _rows(long_index, tmp_path / "paper.skv", *PAPER)
    assert rows["paper"]["recall"] == pytest.approx(0.14, abs=0.02)
    assert rows["floor"]["recall"] >= 0.58
    assert rows["floor"]["output_error"] <= 0.075
    assert rows["mean"]["recall"] >= 0.63
    assert rows["mean"]["output_error"] <= 0.067


def test_the_default_beats_what_clusters_of_keys_recall(long_index: Artifact, tmp_path: Path) -> None:
    rows = _rows(long_index, tmp_path / "default.skv")
    assert rows["mean"]["recall"] >= 0.64
    assert rows["reranked"]["recall"] >= 0.78
    assert rows["reranked"]["kv_fraction"] <= 0.12
    assert rows["reranked"]["output_error"] <= 0.055
    assert rows["reranked + residual"]["output_error"] <= 0.046
    assert rows["mean + residual"]["output_error"] <= 0.046
