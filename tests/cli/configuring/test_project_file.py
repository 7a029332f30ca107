"""A sparsekv.toml that is not possible: one line that names the file, the key and the remedy, and exit code 2."""

import os
from pathlib import Path

import pytest
from support.command import fails, run_here

GENERATE, BUILD = ("generate", "Why?"), ("build-index", "doc.txt", "-o", "new.skv")


@pytest.mark.parametrize(
    ("file", "command", "says"),
    [
        ("index = \n", GENERATE, ("sparsekv.toml is not valid TOML", "line 1", "correct it")),
        ("[" * 20000, GENERATE, ("sparsekv.toml is not valid TOML", "correct it")),
        (b"index = '\xff'", GENERATE, ("sparsekv.toml is not text in UTF-8",)),
        ("#" * 70_000, GENERATE, ("sparsekv.toml is longer than 64 KiB",)),
        (
            "indx = 'doc.skv'",
            GENERATE,
            ("sparsekv.toml, line 1: indx is not an option that all", "did you mean index?"),
        ),
        ("budget = 0.1", GENERATE, ("line 1: budget is not an option that all commands share", "[generate]")),
        ("[generat]\nbudget = 1", GENERATE, ("line 1: there is no command generat (did you mean generate?)",)),
        ("\n[generate]\nbudgett = 1", GENERATE, ("line 3: generate has no option budgett (did you mean budget?)",)),
        ("[generate]\nmax_new_tokens = 1", GENERATE, ("line 2: generate has no option", "mean max-new-tokens?")),
        ("[generate]\nno-replace = true", GENERATE, ("has no option no-replace (did you mean replace?)",)),
        ("[generate.deep]\nx = 1", GENERATE, ("generate has no option deep",)),
        ("generate = 1", GENERATE, ("generate is not an option that all commands share",)),
        ("[models]\nquiet = true", ("models", "list"), ("line 2: quiet is not a command of models", "[models.pull]")),
        ("[models]\nlist = 1", ("models", "list"), ("line 2: list is a command; write [models.list]",)),
        ("index = 3", GENERATE, ("line 1: index is an integer; write text in quotes",)),
        ("[generate]\nseed = '1'", GENERATE, ("line 2: seed is a string; write a whole number",)),
        ("[generate]\nseed = 1.5", GENERATE, ("seed is a number; write a whole number",)),
        ("[generate]\nahead = 1", GENERATE, ("ahead is an integer; write true or false",)),
        ("[generate]\nbudget = true", GENERATE, ("budget is a boolean; write text in quotes, or a number",)),
        ("[generate]\nbudget = [1]", GENERATE, ("budget is an array; write text",)),
        ("[generate]\nguard = 1979-05-27", GENERATE, ("guard is a date or time; write a number",)),
        ("[generate]\ntemperature = nan", GENERATE, ("--temperature nan: give a finite number",)),
        ("[build-index]\nmethod = [['a']]", BUILD, ("method is an array; write text",)),
    ],
)
def test_what_is_not_possible(place: Path, file: str | bytes, command: tuple[str, ...], says: tuple[str, ...]) -> None:
    Path("sparsekv.toml").write_bytes(file if isinstance(file, bytes) else file.encode())
    before = sorted(place.rglob("*"))
    fails(2, *command, says=says)
    if command[0] == "generate":
        fails(2, "config", says=says)
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_is_followed(place: Path, encoding: str) -> None:
    Path("sparsekv.toml").write_bytes("[generate]\nseed = '1'".encode(encoding))
    fails(2, *GENERATE, says=("sparsekv.toml, line 2: seed is a string",))


def test_an_index_is_in_the_folder_whatever_way_its_name_takes(
    place: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`a/..` is the folder where the link goes to the system, and nothing to who shortens the name."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (place / "doc.skv").rename(elsewhere / "real.skv")
    (place / "sub" / "deep").mkdir(parents=True)
    (place / "sub" / "x.skv").mkdir()
    (place / "a").symlink_to("sub/deep")
    (place / "x.skv").symlink_to(elsewhere / "real.skv")
    for name in ("x.skv", "a/../x.skv"):
        Path("sparsekv.toml").write_text(f"index = '{name}'\n")
        fails(2, *GENERATE, says=(f"the index {name} is outside the folder of this file",))


def test_what_is_no_file(place: Path) -> None:
    for make in (os.mkdir, os.mkfifo):
        make("sparsekv.toml")
        fails(2, *GENERATE, says=("sparsekv.toml", "is not a file" if make is os.mkfifo else "sparsekv.toml"))
        os.rmdir("sparsekv.toml") if make is os.mkdir else os.unlink("sparsekv.toml")
    Path("sparsekv.toml").symlink_to("gone")
    fails(2, *GENERATE, says=("sparsekv.toml cannot be read: no such file", "move it away"))


def test_another_commands_table_stops_no_command(place: Path) -> None:
    """Its options are looked at where they are used, and by `config`: no other command's modules are imported."""
    Path("sparsekv.toml").write_text("[tune]\nnonsense = 1\n")
    assert run_here("inspect", "-q").code == 0
    fails(2, "config", says=("line 2: tune has no option nonsense",))


def test_a_removed_folder_is_refused(place: Path) -> None:
    (place / "gone").mkdir()
    os.chdir("gone")
    (place / "gone").rmdir()
    outcome = run_here("models", "list", "--json")
    os.chdir(place)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr == "sparsekv: error: the current folder no longer exists; change to another folder\n"


def test_config_says_what_is_set_and_where(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSEKV_CACHE")
    none = run_here("config")
    assert (none.code, none.stdout) == (0, "")
    assert none.stderr.startswith("no defaults are set: no sparsekv.toml is here or above")
    written = '# ours\nindex = "doc.skv"\n[build-index]\n\nmethod = [\n "codes",\n]\nraw = true\n'
    Path("sparsekv.toml").write_text(written)
    monkeypatch.setenv("SPARSEKV_INDEX", "\x1b[2Jevil.skv")
    shown = run_here("config")
    assert shown.code == 0
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.stdout.splitlines()[3:-1]]
    assert rows == [
        ["all", "index", "\\x1b[2Jevil.skv", "SPARSEKV_INDEX"],
        ["all", "index", "doc.skv", "sparsekv.toml, line 2; SPARSEKV_INDEX outranks it"],
        ["build-index", "method", "codes", "sparsekv.toml, line 5"],
        ["build-index", "raw", "true", "sparsekv.toml, line 8"],
    ]
