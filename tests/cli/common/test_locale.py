"""Commands in the C locale, where Python would take names and arguments for ASCII."""

import os
import subprocess
from pathlib import Path

import pytest
from support.command import EXECUTABLE


@pytest.mark.parametrize(
    "locale",
    [
        pytest.param({"LC_ALL": "C", "PYTHONUTF8": "0"}, id="C"),
        pytest.param({"LC_ALL": "C.UTF-8"}, id="UTF-8", marks=pytest.mark.slow),
    ],
)
def test_a_question_in_utf8_is_text_in_every_locale(tmp_path: Path, locale: dict[str, str]) -> None:
    """It comes as far as to its index, whose name has a letter beyond ASCII, too."""
    command = [str(EXECUTABLE), "generate", "--index", "nön.skv", "Wo ist das Gehäuse?"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | locale, capture_output=True, check=False)
    said = done.stderr.decode()
    assert ("not text in UTF-8" in said, "nön.skv" in said) == (False, True), said


def test_what_is_not_in_utf8_is_still_told(tmp_path: Path) -> None:
    command = [str(EXECUTABLE).encode(), b"serve", b"--host", b"\xff", b"doc.skv"]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | locale, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"is not text in UTF-8" in done.stderr
