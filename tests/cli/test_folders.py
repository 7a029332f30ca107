"""`build-index` of a folder, and of several files as one: what is built, told and kept."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command import Outcome, fails, run_here, start
from support.odd_documents import GERMAN, pdf, shown, valid
from support.sealing import reseal
from torch.testing import assert_close

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.index.manifest import read_manifest
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import SourceFile
from sparsekv.formats.models.load import load_tokenizer

HOW = ("--model", "model", "--method", "squeezed", "--tail", "32")
ASK = ("What is it?", "--max-new-tokens", "2", "-q", "--model", "model")


@pytest.fixture
def project(place: Path) -> Path:
    """A folder of files beside the model."""
    return _write(place / "project")


@pytest.fixture(scope="module")
def of_project(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index of the folder, to be copied, never changed."""
    place = tmp_path_factory.mktemp("folders")
    (place / "model").symlink_to(built / "model")
    _write(place / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        _build("project", "-q")
    return place / "project.skv"


@pytest.fixture
def indexed(project: Path, of_project: Path) -> Path:
    """A folder of files beside the model and its index `project.skv`."""
    shutil.copytree(of_project, project.with_suffix(".skv"))
    return project


def _write(folder: Path) -> Path:
    for name in ("a.md", "src/b.py", "src/c.py", "z.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n" + "".join(f"{name} has line {line}.\n" for line in range(12)))
    return folder


def _build(*arguments: str) -> Outcome:
    built = run_here("build-index", *arguments, *HOW)
    assert built.code == 0, built.stderr
    return built


def _table(index: str) -> tuple[SourceFile, ...]:
    table = read_manifest(Path(index)).prompt.files
    assert table is not None
    return table


def test_a_folder_is_one_document_with_a_table_of_its_files(project: Path) -> None:
    (project / "picture.png").write_bytes(b"\x89PNG\0")
    (project / ".git").mkdir()
    built = start("build-index", "project", *HOW, cwd=project.parent).wait()
    assert (built.code, built.stdout) == (0, "project.skv\n"), built.stderr
    artifact = Artifact(project.parent / "project.skv")
    tokens = artifact.manifest.split.tokens
    chat = artifact.manifest.prompt.chat
    assert chat is not None
    own = tokens - len(load_tokenizer("model").encode(chat.before, add_special_tokens=False))
    with_template = f"with the chat template {tokens:,} of 4,096 that the model holds"
    assert f"4 files, {own:,} tokens; {with_template}; left out: 1 hidden, 1 not text (picture.png)\n" in built.stderr
    ids, tokenizer, border = artifact.input_ids(), load_tokenizer("model"), artifact.manifest.prompt.border
    assert border is not None
    for file in _table("project.skv"):
        data = (project / file.path).read_bytes()
        assert (file.sha256, file.first_line) == (hash_bytes(data), 1)
        text = str(tokenizer.decode(ids[file.start : file.stop]))
        assert f"{text}{border.held if file.path == 'z.txt' else ''}" == data.decode().strip()
    assert "# File: src/b.py\n\n# src/b.py\n" in str(tokenizer.decode(ids))
    asked = run_here("generate", "--index", "project.skv", *ASK)
    assert asked.code == 0, asked.stderr
    again = run_here("build-index", "project", *HOW)
    assert "project.skv is up to date: nothing to build" in again.stderr


def test_a_folder_may_be_named_by_a_way_up(project: Path) -> None:
    built = run_here("build-index", f"../{project.parent.name}/project/../project", *HOW, "-o", "up.skv")
    assert built.code == 0, built.stderr
    assert "z.txt" in {file.path for file in _table("up.skv")}


def test_inspect_shows_the_files(indexed: Path) -> None:
    shown = run_here("inspect", "--index", "project.skv", "--verify")
    assert "4 in the order path; most tokens: src/b.py" in " ".join(shown.stdout.split())
    assert "the ranges of 4 source files are in order, within the prompt" in shown.stderr
    told = json.loads(run_here("inspect", "--index", "project.skv", "--json", "-q").stdout)
    assert [SourceFile(**file) for file in told["files"]] == [*_table("project.skv")]


def _edit(project: Path) -> None:
    (project / "src" / "c.py").write_text("c has other lines now.\n" * 9)


def _add(project: Path) -> None:
    (project / "src" / "bb.py").write_text("A new file.\n")


def _remove(project: Path) -> None:
    (project / "src" / "c.py").unlink()


def _rename(project: Path) -> None:
    (project / "src" / "c.py").rename(project / "src" / "d.py")


CHANGED = {
    _edit: "src/c.py changed",
    _add: "src/bb.py added",
    _remove: "src/c.py removed",
    _rename: "src/c.py renamed to src/d.py",
}


@pytest.mark.parametrize("change", CHANGED)
def test_after_a_change_the_index_is_that_of_a_fresh_build(indexed: Path, change: Callable[[Path], None]) -> None:
    held = read_manifest(Path("project.skv")).split.tokens
    change(indexed)
    told = _build("project").stderr
    history = read_manifest(Path("project.skv")).file_history
    assert history is not None
    assert history.changes == ({"src/c.py": 1} if change is _edit else {})
    before = next(file for file in _table("project.skv") if file.path == "src/b.py").stop // 256 * 256
    assert f"project.skv: kept {before:,} of {held:,} tokens: {CHANGED[change]}\n" in told
    _build("project", "-q", "-o", "fresh.skv")
    ours, fresh = (read_manifest(Path(name)) for name in ("project.skv", "fresh.skv"))
    assert ours.prompt == fresh.prompt
    answers = [run_here("generate", "--index", name, *ASK).stdout for name in ("project.skv", "fresh.skv")]
    assert answers[0] == answers[1] != ""


def test_files_that_have_no_text_any_more_are_named(indexed: Path) -> None:
    (indexed / "src" / "c.py").unlink()
    (indexed / "a.md").write_bytes(b"\0\1\2")
    (indexed / "src" / "b.py").rename(indexed / "e.py")
    (indexed / "d.md").write_text("Fourth file.\n")
    told = _build("project").stderr
    gone = "a.md (not text), src/b.py (renamed to e.py), src/c.py (not there)"
    assert f"project.skv had files that are not in its document now: {gone}" in told


CHANGES = (_edit, _add, _remove, _rename)
FAST = [("stable", _add), ("changed-last", _edit)]


@pytest.mark.parametrize(
    ("order", "change"),
    [
        pytest.param(order, change, marks=() if (order, change) in FAST else pytest.mark.slow)
        for order in ("path", "stable", "changed-last")
        for change in CHANGES
    ],
)
def test_in_each_order_the_index_is_that_of_its_text(project: Path, order: str, change: Callable[[Path], None]) -> None:
    """A document of one text holds the files as the index has them."""
    _build("project", "-q", "--order", order)
    for step in (change, _edit_first):
        step(project)
        _build("project", "-q")
        Path("joined.txt").write_text(_joined(project, "project.skv"))
        _build("joined.txt", "-q", "--force")
        ours, fresh = (read_manifest(Path(name)) for name in ("project.skv", "joined.skv"))
        assert ours.prompt.ids_sha256 == fresh.prompt.ids_sha256
        for name in ("context/layer_000.safetensors", "context/layer_002.safetensors"):
            rows = [Artifact(Path(index)).tensors(name) for index in ("project.skv", "joined.skv")]
            assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-5)
        answers = [run_here("generate", "--index", name, *ASK).stdout for name in ("project.skv", "joined.skv")]
        assert answers[0] == answers[1] != ""


def _edit_first(project: Path) -> None:
    (project / "a.md").write_text("a has other lines now.\n" * 9)


def _joined(project: Path, index: str) -> str:
    return "\n\n".join(f"# File: {file.path}\n\n{(project / file.path).read_text().rstrip()}" for file in _table(index))


def _paths(index: str = "project.skv") -> list[str]:
    return [file.path for file in _table(index)]


def test_an_added_file_costs_itself_alone(project: Path) -> None:
    _build("project", "-q", "--order", "stable")
    end = _table("project.skv")[-1].stop
    (project / "__init__.py").write_text("A new file.\n")
    told = _build("project").stderr
    assert _paths() == ["a.md", "src/b.py", "src/c.py", "z.txt", "__init__.py"]
    assert f"kept {end // 256 * 256:,} of " in told


def test_a_changed_file_goes_to_the_end_and_stays_there(project: Path) -> None:
    _build("project", "-q", "--order", "changed-last")
    _edit_first(project)
    _build("project", "-q")
    assert _paths() == ["src/b.py", "src/c.py", "z.txt", "a.md"]
    start = _table("project.skv")[-1].start
    (project / "a.md").write_text("a has still other lines.\n" * 9)
    told = _build("project").stderr
    assert f"kept {start // 256 * 256:,} of " in told
    _edit(project)
    _build("project", "-q")
    assert _paths() == ["src/b.py", "z.txt", "src/c.py", "a.md"], "changed once, and twice"
    history = read_manifest(Path("project.skv")).file_history
    assert history is not None
    assert (history.order, history.changes) == ("changed-last", {"src/c.py": 1, "a.md": 2})
    assert "nothing to build" in _build("project").stderr
    assert run_here("append", "--index", "project.skv", "doc.txt", "--rebuild", "-q").code == 0
    assert read_manifest(Path("project.skv")).file_history == history
    _build("project", "-q", "--force")
    assert _paths() == ["a.md", "src/b.py", "src/c.py", "z.txt"]
    history = read_manifest(Path("project.skv")).file_history
    assert history is not None
    assert (history.order, history.changes) == ("path", {}), "a replaced index is as a new one"
    _edit_first(project)
    _build("project", "-q")
    assert _paths()[0] == "a.md"


def test_changes_come_last_where_nothing_is_cut(project: Path) -> None:
    _build("project", "-q", "--order", "changed-last")
    says = ("--order changed-last, which project.skv was built with, puts", "--order path")
    fails(2, "build-index", "project", *HOW, "--max-tokens", "400", says=says)
    _build("project", "-q", "--max-tokens", "400", "--force")
    assert _paths()[0] == "a.md"


def test_white_space_that_no_token_has_changes_the_hash_alone(indexed: Path) -> None:
    with (indexed / "src" / "b.py").open("a") as file:
        file.write("\n\n")
    _build("project", "-q")
    assert _table("project.skv")[1].sha256 == hash_bytes((indexed / "src" / "b.py").read_bytes())


def test_the_file_whose_text_changed_is_told(indexed: Path) -> None:
    with (indexed / "a.md").open("a") as file:
        file.write("\n\n")
    (indexed / "z.txt").write_text("z has other lines now.\n")
    assert "tokens: z.txt changed (also 1 file changed)" in _build("project").stderr


def test_several_files_are_one_document_or_an_index_each(project: Path) -> None:
    told = _build("doc.txt", "project/**/*.py", "project", "--as-one", "--include", "*.py", "-o", "one.skv").stdout
    assert told == "one.skv\n"
    assert [file.path for file in _table("one.skv")] == ["doc.txt", "project/src/b.py", "project/src/c.py"]
    assert _build("project", "project/a.md", "-q", "-o", "each").stdout == "each/project.skv\neach/a.skv\n"
    assert len(_table("each/project.skv")) == 4
    assert read_manifest(Path("each/a.skv")).prompt.files is None


def test_indices_in_a_folder_are_no_text_of_it(project: Path) -> None:
    _build("project", "-q", "-o", "project/all")
    before = read_manifest(project / "all")
    assert "up to date" in _build("project", "-o", "project/all").stderr
    shutil.copytree(project.parent / "doc.skv", project / "doc.skv")
    assert "left out: 2 of indices" in _build("project", "-o", "project/all").stderr
    assert read_manifest(project / "all") == before


def test_a_cut_document_has_the_files_before_the_cut(project: Path) -> None:
    told = _build("project", "--max-tokens", "400").stderr
    files = _table("project.skv")
    assert f"{len(files)} of 4 files, 400 tokens; with the chat template {files[-1].stop:,} of" in told
    assert files[-1].stop == read_manifest(Path("project.skv")).split.tokens
    named = [path for path in ("a.md", "src/b.py", "src/c.py", "z.txt") if path not in {file.path for file in files}]
    assert f"; {files[-1].path} is cut; not in the index: {', '.join(named)}\n" in told
    shown = " ".join(run_here("inspect", "--index", "project.skv").stdout.split())
    cut = f"{files[-1].path} {files[-1].stop - files[-1].start:,} (cut)"
    assert (
        f"after 400 tokens of the document (--max-tokens); {files[-1].path} goes on; {len(named)} files not in" in shown
    )
    assert cut in shown
    told_again = json.loads(run_here("inspect", "--index", "project.skv", "--json", "-q").stdout)
    assert (told_again["files_behind"], told_again["cut_after"]) == (named, 400)


def test_a_file_that_ends_at_the_cut_is_whole(indexed: Path) -> None:
    whole = _table("project.skv")
    template = read_manifest(Path("project.skv")).split.tokens - 1036
    for more, cut in ((0, False), (-1, True)):
        tokens = str(whole[1].stop - template + more)
        _build("project", "-q", "--force", "--max-tokens", tokens)
        assert [file.cut for file in _table("project.skv")] == [False, cut]


def test_too_many_tokens_are_refused_before_the_weights_are_read(project: Path) -> None:
    (project / "large.txt").write_text("words " * 1000)
    shutil.copytree("model", "no-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    refused = run_here("build-index", "project", "--model", "no-weights", "-q")
    assert refused.code == 2
    assert "the largest: large.txt with 5,999, " in refused.error()
    assert "shorten it with --max-tokens 3800" in refused.error()
    assert "4,096 positions; leave files out with --exclude" in refused.error()


def test_the_table_stays_when_the_index_grows(indexed: Path) -> None:
    table = _table("project.skv")
    assert run_here("append", "--index", "project.skv", "doc.txt", "--rebuild", "-q").code == 0
    assert _table("project.skv") == table
    assert run_here("build-index", "project.skv", "--method", "multipole", "-q").code == 0
    assert _table("project.skv") == table
    kept = run_here("generate", "--index", "project.skv", *ASK, "--method", "multipole", "--save-to", "talk.skv")
    assert kept.code == 0, kept.stderr
    assert _table("talk.skv") == table


def test_documents_of_other_kinds_and_encodings_are_read(project: Path) -> None:
    for ending, data in valid(1).items():
        (project / f"b.{ending}").write_bytes(data)
    (project / "c.txt").write_bytes(GERMAN.encode("cp1252"))
    told = _build("project").stderr
    assert "8 files, " in told
    assert "encodings detected: 1 as cp1252 (c.txt)\n" in told
    table = {file.path: file for file in _table("project.skv")}
    ids, tokenizer = Artifact(Path("project.skv")).input_ids(), load_tokenizer("model")
    file = table["b.pdf"]
    assert (file.sha256, file.first_line) == (hash_bytes((project / "b.pdf").read_bytes()), 1)
    assert str(tokenizer.decode(ids[file.pages[1] : file.stop])).startswith("[Page 2]\n")
    assert (len(file.pages), table["c.txt"].pages) == (2, ())
    verified = run_here("inspect", "--index", "project.skv", "--verify")
    assert "the first tokens of 2 pages are in order, within their text" in verified.stderr
    assert "project.skv is up to date: nothing to build" in _build("project").stderr
    _build("project/b.pdf", "-q")
    alone = Artifact(Path("project/b.skv"))
    page = alone.manifest.prompt.pages[1]
    assert str(tokenizer.decode(alone.input_ids()[page:])).startswith("[Page 2]\n")


def test_a_pattern_that_leaves_nothing_out_is_told(project: Path) -> None:
    told = "nothing matches --exclude project/z.txt; patterns are relative to the folder that is named\n"
    assert told in _build("project", "--exclude", "project/z.txt").stderr
    assert told not in _build("project", "--exclude", "z.txt").stderr


def test_pages_without_text_are_named(project: Path) -> None:
    """As a person who reads the pages would miss their text. A page whose text is its line alone is one of them."""
    pages = [shown("One. " * 20) if page in (1, 4) else b"" for page in range(1, 10)]
    (project / "b.pdf").write_bytes(pdf(*pages))
    (project / "c.pdf").write_bytes(pdf(shown("[Page 2]"), shown("Two.")))
    told = "pages without text, as scanned pages are: 7 of 9 in"
    assert f"{told} b.pdf (2, 3, 5, 6, 7, ...)\n" in _build("project").stderr
    assert f"{told} project/b.pdf (2, 3, 5, 6, 7, ...)\n" in _build("project/b.pdf").stderr
    assert told not in _build("project/b.pdf", "-q").stderr
    added = run_here("append", "--index", "project.skv", "project/b.pdf", "--rebuild", "--model", "model")
    assert f"{told} project/b.pdf (2, 3, 5, 6, 7, ...)\n" in added.stderr


def test_encodings_in_a_folder_are_explained_only_where_folders_are_read(project: Path) -> None:
    assert "In a folder, other encodings" in " ".join(run_here("build-index", "--help").stdout.split())
    for command in (("append", "--rebuild"), ("eval",)):
        fails(2, *command, str(project), says=("is a folder",))
        assert "folder, other encodings" not in " ".join(run_here(command[0], "--help").stdout.split())


def test_an_index_of_an_earlier_version_gets_pages_by_a_build(project: Path) -> None:
    """Which prefills nothing again."""
    (project / "b.pdf").write_bytes(valid(1)["pdf"])
    _build("project/b.pdf", "-q")
    new = read_manifest(Path("project/b.skv")).prompt
    reseal(Path("project/b.skv"), lambda fields: fields["prompt"].pop("pages"))
    assert run_here("generate", "--index", "project/b.skv", *ASK, "--sources", "1").code == 0
    assert json.loads(run_here("inspect", "--index", "project/b.skv", "--json", "-q").stdout)["pages"] == []
    told = _build("project/b.pdf").stderr
    assert "to prefill" not in told
    assert read_manifest(Path("project/b.skv")).prompt == new


def test_a_missing_library_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "b.pdf").write_bytes(valid(1)["pdf"])
    monkeypatch.setitem(sys.modules, "pypdf", None)
    assert "1 in need of pip install 'sparsekv[documents]' (b.pdf)" in _build("project").stderr
    fails(1, "build-index", "project/b.pdf", *HOW, "-q", says=("reading PDF needs pip install 'sparsekv[documents]'",))


def _swap(fields: dict[str, Any]) -> None:
    fields["prompt"]["files"].reverse()


def _beyond(fields: dict[str, Any]) -> None:
    fields["prompt"]["files"][-1]["stop"] = fields["prompt"]["tokens"] + 1


def _out(fields: dict[str, Any]) -> None:
    fields["prompt"]["files"][0]["path"] = "../../etc/passwd"


def _pages_beyond(fields: dict[str, Any]) -> None:
    fields["prompt"]["pages"] = [fields["prompt"]["tokens"]]


def _pages_of_another_file(fields: dict[str, Any]) -> None:
    file = fields["prompt"]["files"][1]
    file["pages"] = [file["start"] - 1, file["start"]]


@pytest.mark.parametrize("change", [_swap, _beyond, _out, _pages_beyond, _pages_of_another_file])
def test_a_table_that_cannot_be_is_refused(indexed: Path, change: Callable[[dict[str, Any]], None]) -> None:
    reseal(indexed.parent / "project.skv", change)
    fails(1, "inspect", "--index", "project.skv", "-q", says=("is damaged: field prompt", "--force"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("empty",), ("empty: no text to index", "choose a folder or files with text")),
        (("project", "--include", "*.rst"), ("no text to index (left out: 4 not included)",)),
        (("doc.txt", "--include", "*.txt"), ("--include *.txt", "name a folder")),
        (("project", "doc.txt", "--as-one"), ("name the index with --output NAME.skv",)),
        (("project", "none.txt", "--as-one", "-o", "x.skv"), ("no such file: none.txt",)),
        (("project", "-", "--as-one", "-o", "x.skv"), ("standard input has no name",)),
        (("*.rst", "--as-one", "-o", "x.skv"), ("no file matches *.rst",)),
        (("project", "--exclude", "!"), ("--exclude !: this is not a valid pattern",)),
        (("half.skv",), ("half.skv is the folder of an unfinished index",)),
        (("doc.skv", "--exclude", "*.md"), ("--exclude: doc.skv is an index",)),
        (("project", "--ray", "auto", "--as-one"), ("leave --ray out",)),
        (("project", "--order", "age"), ("--order age", "path", "stable", "changed-last")),
        (("doc.txt", "--order", "stable"), ("--order stable", "name a folder, or give --as-one")),
        (("doc.txt", "model/config.json", "--as-one", "-o", "x.skv", "--exclude", "*.txt"), ("--exclude *.txt",)),
        (("--from-file", "list", "--include", "*.md"), ("--include *.md", "no folder is given")),
        (("--from-file", "list", "--order", "stable"), ("--order stable", "name a folder, or give --as-one")),
        (("doc.txt", "empty", "--as-one", "-o", "x.skv"), ("empty has no file to index",)),
        (("doc.txt", "odd.bin", "--as-one", "-o", "x.skv"), ("odd.bin is not text", "leave it out")),
        (("doc.txt", "odd.pdf", "--as-one", "-o", "x.skv"), ("odd.pdf is damaged", "leave it out")),
    ],
)
def test_refusals(project: Path, arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    for name in ("empty", "half.skv"):
        (project.parent / name).mkdir()
    Path("list").write_text("doc.txt\n")
    for name in ("odd.bin", "odd.pdf"):
        Path(name).write_bytes(b"%PDF\0")
    fails(2, "build-index", *arguments, "--model", "model", "-q", says=says)


def test_names_that_steer_a_terminal_are_shown_escaped(project: Path) -> None:
    (project / "\x1b[2J\n.txt").write_text("text")
    told = _build("project").stderr
    assert "\x1b" not in told
    assert "1 with control characters in their names (\\x1b[2J .txt)" in told
