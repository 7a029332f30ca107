"""A sparsekv.toml in a folder that a stranger has made: it names no model, no file and no other index."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from support.sandbox import INDEX, Sandbox, changes, hash_tree

from sparsekv.cli.app import app
from sparsekv.cli.common.commands import COMMANDS
from sparsekv.cli.configuring.project_file import kinds_of, long_name, refuse_calls_own
from sparsekv.cli.configuring.sources import leaf_commands
from sparsekv.formats.errors import UsageError

FILE = "sparsekv.toml"
DECIDED_BY_CALLS = {
    "append": ("rebuild", "again", "special-tokens"),
    "build-index": ("output", "force", "ray", "special-tokens"),
    "eval": ("data", "pairs", "work", "keep-indices", "plot", "ray"),
    "generate": ("prompt-file", "batch-file", "resume", "save-to", "special-tokens"),
    "recall-report": ("queries", "plot", "special-tokens"),
    "inspect": ("plot",),
    "serve": ("api-key-file", "host", "cors"),
    "tune": ("reset",),
    "bench": ("plot",),
    "bench-model": ("config",),
}


def every_option() -> list[tuple[str, Any, Any]]:
    """Every option of every command: the command's name, the option, the type of its value."""
    group: Any = typer.main.get_command(app)
    ctx = typer.Context(group)
    leaves = [leaf for name in COMMANDS for leaf in leaf_commands((name,), group.get_command(ctx, name))]
    return [
        (" ".join(path), one, kinds_of(command)[one.name])
        for path, command in leaves
        for one in command.params
        if one.param_type_name == "option"
    ]


def refused(option: Any, kind: Any) -> bool:
    try:
        refuse_calls_own(option, kind, FILE)
    except UsageError:
        return True
    return False


def test_no_option_that_names_a_file_or_decides_what_is_written_is_taken() -> None:
    """Commands and options that come later too: whatever a help page calls a file or a folder."""
    found: dict[str, set[str]] = {}
    for command, option, kind in every_option():
        name, shown = long_name(option), f"{option.metavar or ''} {kind}"
        says_so = any(word in shown for word in ("FILE", "FOLDER", ".skv", "Path")) or name.endswith("file")
        if says_so and name != "index":
            assert refused(option, kind), f"{command} --{name}"
        if refused(option, kind):
            found.setdefault(command, set()).add(name)
    for command, names in DECIDED_BY_CALLS.items():
        assert set(names) <= found[command], command
    assert "generate" in found


@pytest.mark.parametrize(
    ("table", "arguments"),
    [
        ("[generate]\nsave-to = 'notes.txt'", ("generate", "Why?")),
        ("[generate]\nprompt-file = '/etc/passwd'", ("generate",)),
        ("[generate]\nspecial-tokens = true", ("generate", "Why?")),
        ("[build-index]\noutput = 'mail/doc.skv'\nforce = true", ("build-index", "more.txt")),
        ("[append]\nagain = true", ("append", "more.txt")),
        ("[build-index]\nray = '127.0.0.1:6379'", ("build-index", "more.txt")),
        ("[tune]\nreset = true", ("tune",)),
        ("[eval]\nwork = '/'", ("eval", "doc.txt")),
        ("[inspect]\nplot = '.bashrc.png'", ("inspect",)),
    ],
)
def test_a_file_that_would_write_or_read_elsewhere_is_refused(
    sandbox: Sandbox, table: str, arguments: tuple[str, ...]
) -> None:
    (sandbox.home / FILE).write_text(f"{table}\n")
    before = hash_tree(sandbox.home)
    run = sandbox.run(*arguments)
    run.assert_harmless()
    assert run.code == 2
    assert "is not read from a file" in run.stderr
    assert changes(before, hash_tree(sandbox.home)) == []


@pytest.mark.parametrize(
    "value", ["../../mail/doc.skv", "HOME/mail/doc.skv", "linked.skv", "linked/doc.skv", "\\u0000"]
)
def test_another_index_is_not_reached(sandbox: Sandbox, value: str) -> None:
    """With `append`, which would change it."""
    clone = sandbox.home / "clone" / "sub"
    clone.mkdir(parents=True)
    (clone / "linked.skv").symlink_to(sandbox.index)
    (clone / "linked").symlink_to(sandbox.index.parent)
    (clone / FILE).write_text(f'index = "{value.replace("HOME", str(sandbox.home))}"\n')
    shutil.copy(sandbox.home / "more.txt", clone)
    before = hash_tree(sandbox.home)
    run = sandbox.zygote.run("append", "more.txt", folder=clone, environment={"HOME": str(sandbox.home)})
    run.assert_harmless()
    assert run.code == 2, run
    assert "outside the folder of this file" in run.stderr
    assert changes(before, hash_tree(sandbox.home)) == []


@pytest.mark.thinned
@pytest.mark.parametrize("table", ["", "[generate]\n"])
@pytest.mark.parametrize("model", ["evil", "./evil", "someone/evil", "~/evil", "HOME/evil"])
def test_a_model_is_not_loaded_because_a_file_names_it(sandbox: Sandbox, table: str, model: str) -> None:
    shutil.copytree(sandbox.model, sandbox.home / "evil")
    (sandbox.home / FILE).write_text(f"{table}model = '{model.replace('HOME', str(sandbox.home))}'\n")
    run = sandbox.run("generate", "Why?", "-i", INDEX)
    run.assert_harmless()
    assert run.code == 2
    assert "which you have not yet given with --model" in run.stderr
    named = sandbox.home / "cache" / "named_models.json"
    assert not named.exists() or str(sandbox.home / "evil") not in json.loads(named.read_text())


def test_a_model_that_was_named_is_loaded(sandbox: Sandbox) -> None:
    (sandbox.home / FILE).write_text(f"model = '{sandbox.model}'\n")
    ask = ("generate", "Why?", "-i", INDEX, "--max-new-tokens", "1")
    assert sandbox.run(*ask, "--model", sandbox.model).code == 0
    assert sandbox.run(*ask).code == 0


def test_odd_files_are_told_in_a_line(sandbox: Sandbox) -> None:
    odd = {
        "escape codes": b'index = "\x1b]0;owned\x07"',
        "escaped": b'[generate]\n"\\u001b[2J" = 1',
        "a key of dots": b'"a.b"."c" = 1',
        "deep": b"a = " + b"[" * 5000,
        "zero bytes": b"\0" * 100,
        "a huge number": b"[generate]\nseed = " + b"9" * 4000,
        "surrogates": b'index = "\\ud800"',
    }
    for content in odd.values():
        (sandbox.home / FILE).write_bytes(content)
        for command in (("generate", "Why?"), ("config",)):
            run = sandbox.run(*command)
            run.assert_harmless()
            assert run.code == 2, (content[:40], run)


def test_a_pipe_does_not_hang_a_command(sandbox: Sandbox) -> None:
    os.mkfifo(sandbox.home / FILE)
    run = sandbox.run("inspect", "-i", INDEX)
    run.assert_harmless()
    assert (run.code, "is not a file" in run.stderr) == (2, True)


def test_what_is_beside_the_file_is_found_by_no_link(sandbox: Sandbox, tmp_path: Path) -> None:
    """A file that is a link is read as what it leads to, and its paths are from where it was found."""
    (tmp_path / "elsewhere.toml").write_text('index = "mail/doc.skv"\n')
    (sandbox.home / FILE).symlink_to(tmp_path / "elsewhere.toml")
    run = sandbox.run("inspect", "--json", "-q")
    assert (run.code, json.loads(run.stdout)["index"]) == (0, INDEX)
