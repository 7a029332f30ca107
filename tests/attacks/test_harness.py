"""Tests of the attacks' harness: runs end as the installed command's do, and each change in a home is seen."""

import signal
from pathlib import Path

import pytest
from support.command import installed
from support.forked import zygote
from support.sandbox import INDEX, VICTIMS, Sandbox, changes, hash_tree


def test_a_forked_run_ends_as_the_installed_command(sandbox: Sandbox) -> None:
    arguments = ("recall-report", "-i", INDEX, "--budget", "0.1", "--json")
    forked, whole = sandbox.run(*arguments), installed(*arguments, cwd=sandbox.home)
    assert (forked.code, forked.stdout, forked.stderr) == (whole.returncode, whole.stdout, whole.stderr)


def test_a_run_is_killed_where_it_hangs_or_is_told_to(sandbox: Sandbox) -> None:
    asking = [*sandbox.asking()]
    asking[asking.index("--max-new-tokens") + 1] = "3000"
    late = sandbox.run(*asking, seconds=0.5)
    assert late.late
    with pytest.raises(AssertionError, match="hangs"):
        late.assert_harmless()
    before = hash_tree(sandbox.home)
    killed = sandbox.append(kill_before=1)
    assert killed.code == -signal.SIGKILL
    assert not changes(before, hash_tree(sandbox.home))
    with pytest.raises(AssertionError, match="SIGKILL"):
        killed.assert_harmless()


def test_standard_files_can_be_closed_or_others(sandbox: Sandbox) -> None:
    (sandbox.home / "question").write_text("What?")
    arguments = [argument for argument in sandbox.asking() if argument != "What is 7 times 7?"]
    assert sandbox.run(*arguments, stdin=str(sandbox.home / "question")).code == 0
    assert sandbox.run("--version", stdout=None).stdout == ""


def test_every_change_in_a_home_is_seen(sandbox: Sandbox) -> None:
    before, home = hash_tree(sandbox.home), sandbox.home
    (home / "notes.txt").write_text("forgotten")
    (home / ".bashrc").unlink()
    (home / "mail/layers/download.tmp").unlink()
    (home / "mail/layers/download.tmp").symlink_to("../notes.txt")
    (home / "saved.skv").mkdir()
    (home / "saved.skv/manifest.json").write_text("{}")
    found = changes(before, hash_tree(home), "saved.skv")
    assert found == [".bashrc", "mail/layers/download.tmp", "notes.txt"]
    assert VICTIMS.keys() > set(found)


def test_what_fails_must_say_one_line_with_a_remedy(tmp_path: Path) -> None:
    wrong = zygote().run("inspect", "-i", "none.skv", folder=tmp_path)
    wrong.assert_harmless()
    assert wrong.told().startswith("no index at none.skv; ")
