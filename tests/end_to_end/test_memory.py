"""Peak memory of a 16K build: the model, its cache of keys and values, and a layer's worth beside them."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.command import environment
from support.peak import PEAK

MEASURE = f"""{PEAK}
import sys
from sparsekv.cli.main import run
from sparsekv.formats.models.load import load_model
loaded = load_model(rope_scaling="yarn:2")
loaded.model(input_ids=loaded.tokenizer("warm " * 400, return_tensors="pt").input_ids)
del loaded
sys.stderr.write(f"{{peak()}}\\n")
try: run()
except SystemExit as end: sys.stderr.write(f"{{peak()}} {{end.code}}\\n")
"""


@pytest.mark.slow
def test_sixteen_thousand_tokens(embedded_folder: Path, document: Path, tmp_path: Path) -> None:
    options = ["--max-tokens", "16320", "--rope-scaling", "yarn:2", "-q"]
    command = [sys.executable, "-c", MEASURE, "build-index", str(document), "-o", str(tmp_path / "long.skv"), *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    before, after = done.stderr.split("\n")[:2]
    assert after.split()[1] == "0", done.stderr
    cache = 2 * 30 * 3 * (16320 + 24) * 64 * 4
    layer = cache // 30
    assert int(after.split()[0]) - int(before) < cache + 4 * layer + 200e6
