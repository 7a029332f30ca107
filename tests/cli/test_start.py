"""What a command imports before it has something to do."""

import subprocess
import sys

COMMANDS = ("generate", "models", "recall_report")


def test_options_are_read_without_transformers() -> None:
    """Which takes longer to import than all else: --help, a mistyped option and a report of the tail do not wait."""
    slow = "[name for name in ('transformers', 'faiss') if name in sys.modules]"
    imports = "".join(f"import sparsekv.cli.{one}; print('{one}', {slow});" for one in COMMANDS)
    said = subprocess.run([sys.executable, "-c", f"import sys; {imports}"], capture_output=True, text=True, check=True)
    assert said.stdout == "".join(f"{one} []\n" for one in COMMANDS)
