"""An index bigger than the memory of the process that decodes over it: rows and tables are read as they are needed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import environment, sparsekv
from support.peak import PEAK

from sparsekv.formats.index.reader import Artifact

MEASURE = f"""{PEAK}
import sys
from sparsekv.cli.main import run
try: run()
finally: sys.stderr.write(f"peak {{peak()}}")
"""
QUESTION = "What is a context manager?"


def _answer(index: Path, method: str, placement: str) -> tuple[dict[str, Any], int]:
    """Return the document that `generate --json` prints, and the peak resident memory of its process in bytes."""
    options = ["--method", method, "--budget", "5%", "--placement", placement, "--max-new-tokens", "12", "--json"]
    command = [sys.executable, "-c", MEASURE, "generate", QUESTION, "-i", str(index), *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), int(done.stderr.rpartition("peak ")[2])


@pytest.mark.slow
def test_the_same_answer_in_less_memory(index: Artifact) -> None:
    # By a method that takes the same kernels in both places: one that is compiled takes memory for that.
    on_device, most = _answer(index.folder, "quest", "device")
    on_disk, least = _answer(index.folder, "quest", "disk")
    assert on_disk["text"] == on_device["text"]
    assert on_disk["kv_fraction"] == on_device["kv_fraction"]
    # Laid out in memory the context is there once more than in its files' pages; on disk it is there not at all.
    context = sum(record.bytes for name, record in index.manifest.files.items() if name.startswith("context/"))
    assert most - least > 0.9 * context


@pytest.mark.slow
def test_four_gigabytes_in_two(embedded_folder: Path, document: Path, tmp_path: Path) -> None:
    folder = tmp_path / "big.skv"
    options = ("--max-tokens", "28000", "--rope-scaling", "yarn:4", "--method", "csattention", "--subspace-size", "8")
    built = sparsekv("build-index", document, "-o", folder, *options, "-q", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    assert sum(record.bytes for record in Artifact(folder).manifest.files.values()) >= 4e9
    on_disk, peak = _answer(folder, "csattention", "disk")
    assert peak < 2e9
    assert on_disk["text"] == _answer(folder, "csattention", "device")[0]["text"]
