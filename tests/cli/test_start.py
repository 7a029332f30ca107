"""What a command imports before it has something to do, and what it never imports for a given use."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.command import environment


def test_options_are_read_without_transformers() -> None:
    """Which takes longer to import than all else: --help, a mistyped option and a report of the tail do not wait."""
    code = (
        "import importlib, sys\n"
        "for command in sys.argv[1:]:\n"
        "    importlib.import_module(f'sparsekv.cli.{command}')\n"
        "    slow = ('transformers', 'huggingface_hub', 'faiss', 'matplotlib', 'numba')\n"
        "    print(command, *(name for name in slow if name in sys.modules))\n"
    )
    commands = [
        "append",
        "build_index",
        "chat",
        "convert",
        "generate",
        "inspect",
        "models",
        "recall_report",
        "trace",
        "tune",
    ]
    said = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == commands


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
        (("inspect",), {"transformers", "huggingface_hub", "matplotlib", "numba", "faiss"}),
        pytest.param(
            ("tune", "--target-recall", "0.5", "--method", "squeezed", "--dry-run"),
            {"transformers", "huggingface_hub"},
            marks=pytest.mark.slow,
        ),
        (("recall-report", "--method", "squeezed"), {"transformers", "huggingface_hub", "matplotlib"}),
        (
            ("generate", "What is it?", "--max-new-tokens", "2"),
            {"faiss", "matplotlib", "ray", "gguf", "sparsekv.indexing", "sparsekv.runtime.evaluation"},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_command_imports_nothing_that_its_work_does_not_need(
    command: tuple[str, ...], never: set[str], place: Path
) -> None:
    code = (
        "import sys\n"
        "from sparsekv.cli.main import run\n"
        "try:\n"
        "    run()\n"
        "except SystemExit as ended:\n"
        "    print(ended.code, sorted(sys.modules), file=sys.stderr)\n"
    )
    given = [*command, "--index", "doc.skv", "-q"]
    done = subprocess.run(
        [sys.executable, "-c", code, *given], cwd=place, env=environment(), capture_output=True, text=True, check=True
    )
    code, _, modules = done.stderr.rpartition("\n")[0].rpartition("\n")[-1].partition(" ")
    assert code == "0", done.stderr
    assert never & set(modules.strip("[]").replace("'", "").split(", ")) == set()
