"""Tests of the scripts that `sparsekv completion` prints, in the real shells."""

import subprocess
from pathlib import Path

import pytest
from support.command import fails, run_here
from support.typing_shell import CLEAR_LINE, SHELLS, TYPED, TypingShell, shell_environment

LINES = [
    ("sparsekv gener", "sparsekv generate "),
    ("sparsekv generate --ind", "sparsekv generate --index "),
    ("sparsekv generate --index my", "sparsekv generate --index my\\ manual.skv "),
    ("sparsekv generate --index 'my", "sparsekv generate --index 'my manual.skv' "),
    ("sparsekv generate --index=oth", "sparsekv generate --index=other.skv "),
    ("sparsekv inspect -i sub", "sparsekv inspect -i sub/"),
    ("sparsekv generate --method que", "sparsekv generate --method quest "),
    ("sparsekv generate --method quest --page", "sparsekv generate --method quest --page-size "),
    ("sparsekv generate --placement ho", "sparsekv generate --placement host "),
    ("sparsekv generate --compile=of", "sparsekv generate --compile=off "),
    ("sparsekv generate --model smol", "sparsekv generate --model smollm2-135m-instruct "),
    ("sparsekv build-index man", "sparsekv build-index manual.txt "),
    ("sparsekv build-index --output=sub", "sparsekv build-index --output=sub/"),
    ("sparsekv models pu", "sparsekv models pull "),
    ("sparsekv --debug insp", "sparsekv --debug inspect "),
]
"""Lines as they are typed, and what Tab makes of them."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("my manual.skv", "other.skv", "sub"):
        (tmp_path / name).mkdir()
    (tmp_path / "manual.txt").write_text("a manual")
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_what_was_typed(shell: str, folder: Path) -> None:
    """In bash, and in zsh and fish where they are installed: the parameters are the shells that this machine has."""
    if shell in TYPED:
        _complete_on_a_terminal(shell, folder)
    else:
        _complete_by_asking(shell, folder)


def _complete_on_a_terminal(shell: str, folder: Path) -> None:
    with TypingShell(shell, folder) as typing:
        for typed, completed in LINES:
            typing.enter(f"{typed}\t")
            typing.wait_for(completed.removeprefix(typed).rstrip())
            typing.enter(CLEAR_LINE)
            typing.enter("echo DO''NE\n")
            typing.wait_for("DONE")
            typing.wait_for("READY> ")


def _complete_by_asking(shell: str, folder: Path) -> None:
    """With fish's own command that tells what Tab would list: all that may stand in the place of the last word."""
    for typed, completed in LINES:
        line = typed.replace("'", "\\'")
        script = f"sparsekv completion fish | source; complete --do-complete '{line}'"
        command = [shell, "--no-config", "-c", script]
        done = subprocess.run(command, cwd=folder, env=shell_environment(), capture_output=True, text=True, check=True)
        found = [words.split("\t")[0] for words in done.stdout.splitlines()]
        meant = "".join(letter for letter in completed[typed.rindex(" ") + 1 :].rstrip() if letter not in "'\\")
        assert (found, done.stderr) == ([meant], "")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_one_that_its_shell_reads(shell: str) -> None:
    """The shells that this machine has, bash always; `-n` reads a script without running it."""
    outcome = run_here("completion", shell)
    assert (outcome.code, outcome.stderr) == (0, "")
    subprocess.run([shell, "-n"], input=outcome.stdout, text=True, check=True)


def test_every_shell_has_a_script_that_asks_the_program() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"__complete {shell}" in run_here("completion", shell).stdout
    fails(2, "completion", "tcsh", says=("tcsh", "bash", "zsh", "fish"))


def test_a_name_from_a_stranger_is_not_run_and_not_expanded(folder: Path) -> None:
    """As bash would with a completion that is evaluated."""
    for name in ("$(touch owned).skv", "`touch owned`.skv", "*.skv", "a;touch owned;.skv", "new\nline.skv"):
        (folder / name).mkdir()
    with TypingShell("bash", folder) as typing:
        for start in ("$", "`", "*", "a"):
            typing.enter(f"sparsekv inspect --index \\{start}\t")
            typing.wait_for(".skv")
            typing.enter(f"{CLEAR_LINE}echo DO''NE\n")
            typing.wait_for("DONE")
            typing.wait_for("READY> ")
    assert not (folder / "owned").exists()
