"""Kernels compiled without a GPU: those of attention, those that weigh what is always attended or choose clusters for
several questions, and sums over ranks."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_they_compile_for_a_gpu_in_every_form() -> None:
    """Four kernels of attention, and two for what sequences have for themselves. With rows in 8 bits: in float32 for
    heads of 16 channels, and in float16 for 96, with centroids, a cap and sinks. With rows as they are: in bfloat16 for
    128, with all of these. And seven that rank by codes and by lists: in float16, and in bfloat16 with a cap and sinks.
    Seven for several queries over codes: in float32 for 64 channels with a cap, and in bfloat16 for 256. Four that
    choose clusters for several questions: in bfloat16 for 128, and in float32 for 256 with a cap. And logits of
    centroids in 8 bits, nine products of one row, and seven sums over eight ranks."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "support.gpu_compiler"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "94"), done.stderr
