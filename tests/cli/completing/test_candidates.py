"""Tests of the candidates that completion offers for a command line: completion is quiet and needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from support.command import EXECUTABLE, environment, run_here

from sparsekv.cli.app import app
from sparsekv.cli.common.commands import COMMANDS
from sparsekv.cli.configuring.sources import leaf_commands
from sparsekv.formats.user.cache import cache_root
from sparsekv.indexing.indexers.interface import indexers
from sparsekv.runtime.selection.interface import methods


def ask(*words: str) -> dict[str, str]:
    """Return the candidates for the last word, with their help, as the script of fish asks for them."""
    outcome = run_here("__complete", "fish", *words)
    assert (outcome.code, outcome.stderr) == (0, "")
    return dict(line.split("\t") for line in outcome.stdout.splitlines()[1:])


def kind(*words: str) -> str:
    """Whether words, files or folders may stand there."""
    return run_here("__complete", "fish", *words).stdout.splitlines()[0]


def test_every_command_is_offered_with_what_it_does() -> None:
    assert list(ask("")) == list(COMMANDS)
    assert all(len(text) > 10 for text in ask("").values())


def test_every_option_of_every_command_is_offered() -> None:
    """Also of commands that are added later."""
    group = typer.main.get_command(app)
    for name in COMMANDS:
        command = group.get_command(typer.Context(group), name)  # type: ignore[attr-defined]
        for path, leaf in leaf_commands((name,), command):
            named = {one for option in leaf.params for one in (*option.opts, *option.secondary_opts)}
            assert set(ask(*path, "--")) == {one for one in named if one.startswith("--")} | {"--help"}


def test_methods_and_their_options() -> None:
    assert list(ask("generate", "--method", "")) == [*methods(), "dense", "auto"]
    assert list(ask("build-index", "--method", "")) == [*indexers(), "all"]
    assert "--page-size" in ask("generate", "--")
    assert "--page-size" in ask("generate", "--method", "quest", "--")
    assert "--page-size" in ask("recall-report", "--method=all", "--")
    assert "--page-size" in ask("generate", "--method", "auto", "--")
    assert "--page-size" not in ask("generate", "--method", "squeezed", "--")
    assert "--prefill-queries" in ask("build-index", "--prefill", "quoka", "--")


def test_values_that_an_option_may_have() -> None:
    assert list(ask("generate", "--placement", "")) == ["device", "host", "disk"]
    assert list(ask("generate", "--compile=")) == ["--compile=auto", "--compile=on", "--compile=off"]
    assert list(ask("generate", "--dtype", "b")) == ["bfloat16"]
    assert list(ask("generate", "--batch-size", "")) == ["auto"]
    assert "niah-facts" in ask("eval", "--task", "")
    assert ask("generate", "--seed", "") == {}
    assert ask("generate", "--max-new-tokens", "1") == {}


def test_files_and_folders_are_left_to_the_shell() -> None:
    assert kind("build-index", "") == "file"
    assert kind("generate", "--prompt-file", "") == "file"
    assert kind("build-index", "x", "--output", "") == "folder"
    assert kind("generate", "--model", "") == "folder"
    assert kind("generate", "") == "words"


def test_an_option_is_offered_once_but_for_those_that_are_repeatable() -> None:
    assert "--index" not in ask("generate", "-i", "x", "--")
    assert "--budget" not in ask("generate", "--budget=5%", "--")
    assert "--method" in ask("recall-report", "--method", "quest", "--")


def test_after_two_dashes_and_unknown_commands_nothing_is_an_option() -> None:
    assert ask("generate", "--", "--") == {}
    assert ask("nonsense", "") == {}
    assert ask("generate", "--nonsense", "x", "--ind") == {"--index": ask("generate", "--ind")["--index"]}


def test_indices_are_those_of_the_folder_that_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.skv", "deep/b.skv", ".hidden/c.skv", "x\x1b[2J.skv"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file.skv").write_text("no index")
    assert list(ask("inspect", "--index", "")) == ["a.skv", "deep/"]
    assert list(ask("inspect", "--index", "deep/")) == ["deep/b.skv"]
    assert list(ask("inspect", "-i", ".h")) == [".hidden/"]
    assert list(ask("inspect", "-i", f"{tmp_path}/a")) == [f"{tmp_path}/a.skv"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(ask("inspect", "-i", "~/a")) == ["~/a.skv"]
    assert ask("inspect", "-i", "gone/") == {}


def test_models_are_those_that_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names with control characters, which would steer a terminal, are not shown."""
    ask("")
    program = (cache_root() / "completion.json").read_text()
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
    (tmp_path / "completion.json").write_text(program)
    (tmp_path / "named_models.json").write_text(json.dumps(["someone/tiny", "evil\x1b[2J"]))
    assert list(ask("generate", "--model", "")) == ["smollm2-135m-instruct", "someone/tiny"]


def test_an_answer_needs_no_torch() -> None:
    """Once the commands are known; torch takes longer to import than a person waits for a completion."""
    ask("")
    code = (
        "import sys\n"
        "from sparsekv.cli.main import run\n"
        "sys.argv = ['sparsekv', '__complete', 'bash', 'sparsekv generate --method q', ' =:']\n"
        "try: run()\n"
        "except SystemExit: print([name for name in ('torch', 'typer', 'rich', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "words\nquest\nquoka\n[]\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    "kept", ["", "{", "[]", '{"of": 1}', "[" * 100_000], ids=["empty", "cut", "list", "old", "deep"]
)
def test_what_was_remembered_may_be_damaged(kept: str) -> None:
    (cache_root() / "completion.json").write_text(kept)
    assert "generate" in ask("gen")
    assert json.loads((cache_root() / "completion.json").read_text())["program"]["commands"].keys() == COMMANDS.keys()


@pytest.mark.parametrize(
    "arguments",
    [(), ("bash",), ("bash", "x"), ("tcsh", "x"), ("fish",), ("bash", "sparsekv '", "="), ("zsh", "\udcff")],
    ids=str,
)
def test_nothing_that_is_asked_is_an_error(arguments: tuple[str, ...]) -> None:
    outcome = run_here("__complete", *arguments)
    assert (outcome.code, outcome.stderr) == (0, "")


def test_a_closed_output_is_no_error(tmp_path: Path) -> None:
    ask("")
    script = f"{EXECUTABLE} __complete fish '' >&-; echo $?; {EXECUTABLE} __complete fish '' > /dev/full; echo $?"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("0\n0\n", "")
