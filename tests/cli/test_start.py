"""What a command imports before it has something to do."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["generate", "models"])
def test_options_are_read_without_transformers(command: str) -> None:
    """Which takes longer to import than all else: --help and a mistyped option do not wait for it."""
    code = f"import sys, sparsekv.cli.{command}; print([name for name in ('transformers', 'faiss') if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"
