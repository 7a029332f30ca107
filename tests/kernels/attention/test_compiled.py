"""The kernels of attention, compiled for a GPU without one."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_they_compile_for_a_gpu_in_every_form() -> None:
    """Two kernels, in float32 for heads of 16 channels and in bfloat16 for 128, with rows as they are and in 8 bits."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "support.gpu_compiler"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "8"), done.stderr
