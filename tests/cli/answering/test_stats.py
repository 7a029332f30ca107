"""What `generate --stats` says of time that an answer took once."""

import subprocess
from pathlib import Path

import pytest
from support.command import EXECUTABLE, environment, run_here

TOLD = "compiled kernels for this CPU"


@pytest.mark.slow
def test_the_first_answer_on_a_machine_says_that_kernels_were_compiled_in_it(place: Path) -> None:
    """By processes of their own: numba reads where to keep them when it is imported."""
    ask = "generate", "Why?", "-i", "doc.skv", "--method", "squeezed", "--budget", "50%", "--max-new-tokens", "4"
    kept, said = environment() | {"NUMBA_CACHE_DIR": str(place / "compiled")}, []
    for _ in range(2):
        command = [str(EXECUTABLE), *ask, "--stats"]
        done = subprocess.run(command, cwd=place, env=kept, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "first token after" in done.stderr
        said.append(TOLD in done.stderr)
    assert said == [True, False]


@pytest.mark.usefixtures("place")
def test_what_was_asked_for_is_told_even_where_nothing_else_is() -> None:
    quiet = run_here("generate", "Why?", "--max-new-tokens", "2", "--stats", "-q").stderr
    assert "first token after" in quiet
    assert "index opened in" in quiet
    assert run_here("generate", "Why?", "--max-new-tokens", "2", "-q").stderr == ""
