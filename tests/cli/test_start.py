"""What a command imports before it has something to do."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["generate", "models", "recall_report"])
def test_options_are_read_without_transformers(command: str) -> None:
    """Which takes longer to import than all else: --help, a mistyped option and a report of the tail do not wait."""
    slow = "[name for name in ('transformers', 'faiss') if name in sys.modules]"
    code = f"import sys, sparsekv.cli.{command}; print({slow})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"
