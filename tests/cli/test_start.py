"""Tests of a command's imports before its work begins, and of the modules that a given use never imports."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import environment

INDEX = ("--index", "doc.skv", "-q")
COMMANDS = {
    "inspect": ("inspect", *INDEX),
    "tune": ("tune", "--target-recall", "0.5", "--method", "squeezed", "--dry-run", *INDEX),
    "recall-report": ("recall-report", "--method", "squeezed", *INDEX),
    "generate": ("generate", "What is it?", "--max-new-tokens", "2", *INDEX),
}
LAZY = ("append", "build_index", "chat", "convert", "generate", "inspect", "models", "recall_report", "trace", "tune")
IN_FORKS = """
import importlib, json, os, sys
import torch

def imported(name, call):
    if name == "options":
        for command in call:
            importlib.import_module(f"sparsekv.cli.{command}")
        return 0
    from sparsekv.cli.main import run
    sys.argv = ["sparsekv", *call]
    try:
        run()
    except SystemExit as ended:
        return ended.code

for name, call in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        torch.set_num_threads(1)
        code = imported(name, call)
        with open(f"{name}.json", "w") as file:
            json.dump([code, sorted(sys.modules)], file)
        os._exit(0)
    os.wait()
"""
"""Each call in a fork of one process that has imported torch, which all of them need and takes most of their time."""


@pytest.fixture(scope="module")
def imported(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Modules by the call that has imported them: of COMMANDS, or "options" of all LAZY commands."""
    folder = tmp_path_factory.mktemp("imported")
    shutil.copytree(built / "doc.skv", folder / "doc.skv")
    calls = json.dumps({"options": LAZY} | COMMANDS)
    done = subprocess.run(
        [sys.executable, "-c", IN_FORKS, calls], cwd=folder, env=environment(), capture_output=True, text=True
    )
    ended = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("options", *COMMANDS)}
    assert [code for code, _ in ended.values()] == [0] * len(ended), done.stderr
    return {name: set(modules) for name, (_, modules) in ended.items()}


def test_options_are_read_without_transformers(imported: dict[str, set[str]]) -> None:
    """Which takes longer to import than all else: --help, a mistyped option and a report of the tail do not wait."""
    assert {f"sparsekv.cli.{command}" for command in LAZY} <= imported["options"]
    assert {"transformers", "huggingface_hub", "faiss", "matplotlib", "numba"} & imported["options"] == set()


def test_the_help_of_serve_waits_for_neither_torch_nor_a_web_framework() -> None:
    code = (
        "import sys\nimport sparsekv.cli.serve\n"
        "slow = ('torch', 'numpy', 'transformers', 'starlette', 'uvicorn')\n"
        "print(*(name for name in slow if name in sys.modules))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == []


@pytest.mark.parametrize(
    ("command", "never"),
    [
        ("inspect", {"transformers", "huggingface_hub", "matplotlib", "numba", "faiss"}),
        ("tune", {"transformers", "huggingface_hub"}),
        ("recall-report", {"transformers", "huggingface_hub", "matplotlib"}),
        ("generate", {"faiss", "matplotlib", "ray", "gguf", "sparsekv.indexing", "sparsekv.runtime.evaluation"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_imports_nothing_that_its_work_does_not_need(
    command: str, never: set[str], imported: dict[str, set[str]]
) -> None:
    assert f"sparsekv.cli.{command.replace('-', '_')}" in imported[command]
    assert never & imported[command] == set()
