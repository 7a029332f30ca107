"""A document of several files: which are read, which are left out and why, and which tokens are whose."""

import os
import resource
import socket
import tempfile
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.odd_documents import pdf, shown
from support.tiny_models import tiny_tokenizer
from support.tokenizers_of_families import KINDS, tokenizer_of
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.documents import extracted, files
from sparsekv.formats.documents.document import Document, open_document
from sparsekv.formats.documents.files import Choice, SourceTexts, read_folder, read_several
from sparsekv.formats.documents.prompt import FixedPrompt, encode_prompt
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import is_source_path

PIECES = st.sampled_from(
    ["word", " ", "\n", "\n\n", "    ", "\t", "é", "中文", ").", "#", "x = 1", "\r\n", "<|im_end|>", "</s>", "``` "]
)
NAMES = st.sampled_from(["a.py", "b.md", "c d.txt", "é.csv", "sub/a.py", "sub/z/b.json", "a/b", "sub.txt"])
TREES = st.dictionaries(NAMES, st.lists(PIECES, max_size=8).map("".join), min_size=1, max_size=5)
TRIMMED = "gpt-2 that trims"


@cache
def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    if kind == "bytes":
        return tiny_tokenizer()
    if kind != TRIMMED:
        return tokenizer_of(kind)
    # As of Llama 3 and SmolLM: a token is said to begin behind its white space.
    backend = KINDS["gpt-2 chatml"][0]()
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True)])
    template = tokenizer_of("gpt-2 chatml").chat_template
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def write_tree(folder: Path, tree: dict[str, str]) -> None:
    for name, text in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())


def _shown(text: str) -> str:
    """Without white space, which tokens at a text's ends may share with what is beside it."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _known(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """The characters for which the tokenizer has tokens."""
    unknown = {letter for letter in set(text) if tokenizer.unk_token_id in tokenizer(letter).input_ids}
    return "".join(letter for letter in text if letter not in unknown)


@pytest.mark.parametrize("kind", ["bytes", TRIMMED, "qwen", "llama-2", "gemma", "phi-3", "unigram chatml"])
@settings(max_examples=12)
@given(tree=TREES, raw=st.booleans())
def test_each_files_tokens_decode_to_its_text(kind: str, tree: dict[str, str], raw: bool) -> None:
    tokenizer = _tokenizer(kind)
    with tempfile.TemporaryDirectory() as folder:
        write_tree(Path(folder), tree)
        kept = {name: text for name, text in tree.items() if text.strip()}
        if not kept:
            with pytest.raises(UsageError, match="no text to index"):
                read_folder(Path(folder), Choice())
            return
        sources = read_folder(Path(folder), Choice())
    prompt, plain = encode_prompt(tokenizer, sources, raw=raw), encode_prompt(tokenizer, sources.text, raw=raw)
    assert prompt.input_ids.tolist() == plain.input_ids.tolist()
    assert (prompt.text_sha256, prompt.border, prompt.plain) == (plain.text_sha256, plain.border, plain.plain)
    assert prompt.files is not None
    assert [file.path for file in prompt.files] == sorted(kept, key=lambda name: name.split("/"))
    ids = prompt.input_ids.tolist()
    for number, file in enumerate(prompt.files):
        text, held = kept[file.path], ""
        assert file.sha256 == hash_bytes(text.encode())
        if number == len(prompt.files) - 1 and prompt.border is not None:
            held = prompt.border.held
        decoded = str(tokenizer.decode(ids[file.start : file.stop], clean_up_tokenization_spaces=False)) + held
        assert _shown(decoded.replace("<unk>", "")) == _shown(_known(tokenizer, text)), file
        if "\n" in str(tokenizer.decode(tokenizer("a\nb", add_special_tokens=False).input_ids)):
            assert file.first_line + decoded.rstrip().count("\n") == 1 + text.rstrip().count("\n"), file


@settings(max_examples=20)
@given(tree=TREES, tokens=st.integers(1, 80))
def test_a_cut_document_has_the_files_before_the_cut(tree: dict[str, str], tokens: int) -> None:
    tree |= {"z.txt": "the last of all"}
    tokenizer = tokenizer_of("qwen")
    with tempfile.TemporaryDirectory() as folder:
        write_tree(Path(folder), tree)
        sources = read_folder(Path(folder), Choice())
    whole, cut = encode_prompt(tokenizer, sources), encode_prompt(tokenizer, sources, max_tokens=tokens)
    assert whole.files is not None
    assert cut.files is not None
    if cut.cut is None:
        assert cut.files == whole.files
        return
    length = len(cut.input_ids)
    kept = [file for file in whole.files if file.start < length]
    assert [(file.path, file.start, file.stop) for file in cut.files] == [
        (file.path, file.start, min(file.stop, length)) for file in kept
    ]


@pytest.fixture(scope="module", params=[True, False], ids=["one text", "two files"])
def paged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Document | SourceTexts]:
    """A PDF of four pages: alone, or behind another file."""
    folder = tmp_path_factory.mktemp("paged")
    (folder / "b.pdf").write_bytes(pdf(shown("One page."), shown("[Page 7]"), b"", shown("The end.")))
    (folder / "a.txt").write_text("A text before it.")
    if request.param:
        with open_document(str(folder / "b.pdf"), whole=True) as document:
            yield document
    else:
        yield read_folder(folder, Choice())


def _pages(prompt: FixedPrompt) -> tuple[int, ...]:
    return prompt.pages if prompt.files is None else prompt.files[-1].pages


@pytest.mark.parametrize("kind", ["bytes", TRIMMED, "qwen", "llama-2", "gemma", "unigram chatml"])
def test_pages_are_tokens_of_the_prompt(kind: str, paged: Document | SourceTexts) -> None:
    """Each begins with the line of its page; those behind a cut are left out."""
    tokenizer = _tokenizer(kind)
    prompt = encode_prompt(tokenizer, paged)
    ids, pages = prompt.input_ids.tolist(), _pages(prompt)
    assert [str(tokenizer.decode(ids[page : page + 9])).split("Page")[1].strip()[0] for page in pages] == [*"1234"]
    for cut in (pages[2], pages[2] + 1):
        shorter = encode_prompt(tokenizer, paged, max_tokens=cut - prompt.template)
        assert _pages(shorter) == tuple(page for page in pages if page < cut)


def _names(tokens: SourceTexts) -> list[str]:
    return [file.path for file in tokens.files]


def test_a_document_reads_well(tmp_path: Path) -> None:
    write_tree(tmp_path, {"src/a.py": "\n\n  x = 1\n\n", "README.md": "\ufeffRead me.\n"})
    sources = read_folder(tmp_path, Choice())
    assert sources.text == "# File: README.md\n\nRead me.\n\n# File: src/a.py\n\n  x = 1"
    assert [(file.path, file.first_line) for file in sources.files] == [("README.md", 1), ("src/a.py", 3)]
    assert sources.told() == ""


def test_what_is_left_out_is_counted_by_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    write_tree(
        folder,
        {
            "kept.txt": "kept",
            ".hidden/a.txt": "a",
            ".env": "secret",
            "sub/.gitignore": "*.log\n!keep.log\nbuild/\n",
            "sub/a.log": "a",
            "sub/keep.log": "kept",
            "sub/build/a.txt": "a",
            "old.skv/manifest.json": "{}",
            "other/.sparsekv": "",
            "other/a.txt": "a",
            "page.html": "<p>",
            "zero.bin": "a\0b",
            "blank.txt": " \n",
            "odd\x1b[2J\n.txt": "a",
        },
    )
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / os.fsdecode(b"bytes\xff.txt")).write_text("a")
    (tmp_path / "outside.txt").write_text("outside")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "loop").symlink_to(folder)
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.txt")
    with (folder / "large.txt").open("wb") as file:
        file.truncate(1 << 30)
    (folder / "locked.txt").write_text("a")
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        real = os.open

        def refuse(path: object, *args: int, **how: int) -> int:
            if path == "locked.txt":  # the tests may run as root, for whom nothing is locked
                raise PermissionError(13, "Permission denied")
            assert path not in ("pipe.txt", "socket", "link.txt")
            return real(path, *args, **how)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", refuse)
            sources = read_folder(folder, Choice())
    assert _names(sources) == ["kept.txt", "sub/keep.log"]
    counts = {reason: len(paths) for reason, paths in sources.left_out.items()}
    assert counts == {
        files.HIDDEN: 3,
        files.IGNORED: 2,
        files.INDEX: 2,
        files.LINK: 3,
        files.SPECIAL: 2,
        files.NO_TEXT: 1,
        files.PERHAPS["latin-1"]: 1,
        extracted.NO_TEXT: 1,
        files.EMPTY: 1,
        files.ODD_NAME: 2,
        files.LARGE: 1,
        files.UNREADABLE: 1,
    }
    assert "1 larger than 8 MiB (large.txt)" in sources.told()
    assert "1 not text (zero.bin), 1 not text in UTF-8 but perhaps in latin-1 (latin.txt)" in sources.told()
    assert sources.told().endswith(
        "; convert such files to UTF-8, or give --encoding latin-1, in which all files are read then"
    )
    assert "1 without text (page.html)" in sources.told()
    in_latin = _names(read_folder(folder, Choice(encoding="latin-1")))
    assert in_latin == ["kept.txt", "latin.txt", "locked.txt", "sub/keep.log"]


def test_a_large_file_costs_no_memory(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.txt": "a"})
    for number in range(50):
        with (tmp_path / f"large{number}.txt").open("wb") as file:
            file.truncate(1 << 34)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(read_folder(tmp_path, Choice()).left_out[files.LARGE]) == 50
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_the_text_of_a_folder_is_limited(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b"a" * (files.MOST_BYTES - 1))
    with pytest.raises(UsageError, match="more than 32 MiB of text; choose fewer with --include or --exclude"):
        read_folder(tmp_path, Choice())
    assert len(read_folder(tmp_path, Choice(exclude=("[2-9].txt",))).files) == 2


def test_a_file_that_changes_while_it_is_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, {"a.txt": "a", "growing.txt": "a"})
    real = os.fstat

    def grow(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("growing.txt"):
            with (tmp_path / "growing.txt").open("a") as file:
                file.write("more")
        return found

    monkeypatch.setattr(os, "fstat", grow)
    sources = read_folder(tmp_path, Choice())
    assert (_names(sources), sources.left_out) == (["a.txt"], {files.CHANGED: ["growing.txt"]})


def test_deep_folders_end_somewhere(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(files.MOST_DEPTH + 3):
        folder /= "d"
    folder.mkdir(parents=True)
    write_tree(tmp_path, {"a.txt": "a"})
    assert len(read_folder(tmp_path, Choice()).left_out[files.DEEP]) == 1


def test_include_and_exclude_are_patterns_as_in_a_gitignore(tmp_path: Path) -> None:
    write_tree(tmp_path, dict.fromkeys(["a.py", "b.md", "src/c.py", "src/d.txt", "tests/e.py"], "text"))
    assert _names(read_folder(tmp_path, Choice(include=("*.py",)))) == ["a.py", "src/c.py", "tests/e.py"]
    assert _names(read_folder(tmp_path, Choice(include=("*.py", "b.*"), exclude=("tests/",)))) == [
        "a.py",
        "b.md",
        "src/c.py",
    ]
    assert _names(read_folder(tmp_path, Choice(include=("src/**",)))) == ["src/c.py", "src/d.txt"]
    with pytest.raises(UsageError, match=r"no text to index \(left out: 5 not included\)"):
        read_folder(tmp_path, Choice(include=("*.rst",)))


@pytest.mark.parametrize(
    ("patterns", "read"),
    [
        ("* !src/ !src/*.py", ["src/a.py"]),
        ("* !*/ !*.py", ["src/a.py", "src/sub/b.py", "top.py"]),
        ("/src/* !/src", ["top.py"]),
        ("src/** !secret.txt", ["src/secret.txt", "top.py"]),
        ("/** !/src/ !/src/**/ !b.py", ["src/sub/b.py"]),
        ("**/ !src", ["src/a.py", "src/secret.txt", "top.py"]),
    ],
)
def test_a_pattern_admits_what_it_names_alone_as_in_git(tmp_path: Path, patterns: str, read: list[str]) -> None:
    """A folder that is admitted may have files that are ignored, and a folder of ignored files one that is read."""
    tree = dict.fromkeys(["src/a.py", "src/secret.txt", "src/sub/b.py", "top.py"], "text")
    write_tree(tmp_path, tree)
    assert _names(read_folder(tmp_path, Choice(exclude=tuple(patterns.split())))) == read
    write_tree(tmp_path, {".gitignore": patterns.replace(" ", "\n")})
    assert _names(read_folder(tmp_path, Choice())) == read


def test_a_file_that_is_gone_has_the_reason_of_its_folder(tmp_path: Path) -> None:
    names = "a.txt", "build/b.txt", "build/sub/c.txt", "old/d.txt"
    write_tree(tmp_path, {name: name for name in names})
    before = {file.path: file.sha256 for file in read_folder(tmp_path, Choice()).files}
    (tmp_path / "old" / ".sparsekv").touch()
    (tmp_path / "build" / "b.txt").rename(tmp_path / "f.txt")
    told = "build/b.txt (renamed to f.txt), build/sub/c.txt (excluded), old/d.txt (of indices)"
    for pattern in ("build/", "sub"):
        assert read_folder(tmp_path, Choice(exclude=(pattern,))).told_gone(before) == told


def test_one_of_two_files_of_the_same_content_is_renamed(tmp_path: Path) -> None:
    write_tree(tmp_path, dict.fromkeys(["a.txt", "b.txt"], "text"))
    before = {file.path: file.sha256 for file in read_folder(tmp_path, Choice()).files}
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    assert read_folder(tmp_path, Choice()).told_gone(before) == "a.txt (not there), b.txt (renamed to c.txt)"


def test_patterns_that_match_nothing_are_named(tmp_path: Path) -> None:
    """An unmatched pattern may be a mistake, so a message names it. Patterns match ignored and hidden files too."""
    tree = dict.fromkeys(["a.md", "z.txt", "sub/secret.txt", ".git/a", "build/b.md"], "text") | {".gitignore": "build/"}
    write_tree(tmp_path / "docs", tree)
    for exclude, unmatched in (
        ("docs/sub/", ["--exclude docs/sub/"]),
        ("secret.md", ["--exclude secret.md"]),
        *((pattern, []) for pattern in ("sub/", "sub", "*.txt", "build/", ".git", "!none.md")),
    ):
        found = read_folder(tmp_path / "docs", Choice(("*.md", "*.txt", "*.rst"), (exclude,)))
        assert list(found.unmatched) == ["--include *.rst", *unmatched]
        assert found.told_unmatched().startswith(f"nothing matches {' and '.join(found.unmatched)}; ")
    assert read_folder(tmp_path, Choice(exclude=("docs/sub/",))).told_unmatched() == ""


def test_a_pattern_of_many_stars_ignores_what_it_ignores_in_git(tmp_path: Path) -> None:
    tree = dict.fromkeys(["a" * 200, "docs/a/b/x_y_z.txt", "docs/a/x_y_z.txt"], "text")
    write_tree(tmp_path, tree | {".gitignore": f"{'*a' * 30}b\ndocs/*/*/*_*_*.txt\n"})
    sources = read_folder(tmp_path, Choice())
    assert _names(sources) == ["a" * 200, "docs/a/x_y_z.txt"]
    assert files.WILD not in sources.left_out


def test_a_gitignore_that_is_too_large_is_told_of(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.txt": "a", ".gitignore": "a.txt\n" * files.MOST_IGNORED})
    sources = read_folder(tmp_path, Choice())
    assert "1 unread because it is larger than 64 KiB (.gitignore)" in sources.told()


def test_an_invalid_pattern_of_a_gitignore_is_told_of(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.txt": "a", ".gitignore": "\u00e9[\nb.txt\n", "b.txt": "b"})
    sources = read_folder(tmp_path, Choice())
    assert _names(sources) == ["a.txt"]
    assert sources.left_out[files.WILD] == [".gitignore: \u00e9["]


def test_named_files_and_globs_are_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a.md", "b.py", "docs/c.md", "docs/deep/d.md", "docs/deep/e.txt", "x[1].md", ".hidden.md", "lib/f.md"]
    write_tree(tmp_path / "here", dict.fromkeys(names, "text"))
    write_tree(tmp_path, {"there/g.md": "text"})
    monkeypatch.chdir(tmp_path / "here")

    def names_of(*given: str) -> list[str]:
        return _names(read_several(given, Choice()))

    assert names_of("b.py", "docs/**/*.md", "a.md", "./a.md") == ["a.md", "b.py", "docs/c.md", "docs/deep/d.md"]
    assert names_of("*.md") == ["a.md", "x[1].md"]
    assert names_of("x[1].md", ".hidden.md") == [".hidden.md", "x[1].md"]
    assert names_of("lib", "docs/*.md") == ["docs/c.md", "lib/f.md"]
    assert names_of("a.md", "../there/*.md") == ["here/a.md", "there/g.md"]
    assert names_of(str(tmp_path / "there" / "*")) == ["g.md"]
    for wrong, told in (("none.md", "no such file: none.md"), ("*.rst", "no file matches"), ("-", "standard input")):
        with pytest.raises(UsageError, match=told):
            names_of("a.md", wrong)


def test_a_file_that_several_names_choose_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["docs/a.md", "docs/b.txt", "docs/c.rst", "docs/empty.md", "docs/.hidden", "docs/old.skv/a"]
    write_tree(tmp_path, dict.fromkeys(names, "text") | {"docs/empty.md": "", "docs/zero.md": "a\0b", "empty": ""})
    monkeypatch.chdir(tmp_path)
    sources = read_several(["docs/*.txt", "docs/.hidden", "docs/*.md", "empty"], Choice())
    assert _names(sources) == ["docs/.hidden", "docs/a.md", "docs/b.txt"]
    assert sources.left_out == {
        files.UNLISTED: ["docs/c.rst"],
        files.EMPTY: ["docs/empty.md", "empty"],
        files.INDEX: ["docs/old.skv"],
        files.NO_TEXT: ["docs/zero.md"],
    }


def test_a_named_file_is_judged_by_its_text_and_not_by_a_folder_beside_it(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a": "a", ".env": "", "b.bin": "a\0b"})
    folder, hidden, excluded = str(tmp_path), str(tmp_path / ".env"), str(tmp_path / "b.bin")
    choice = Choice(exclude=("*.bin",))
    for names in ([folder, hidden], [hidden, folder]):
        assert read_several(names, choice).left_out[files.EMPTY] == [".env"]
    for names in ([folder, excluded], [excluded, folder]):
        with pytest.raises(UsageError, match=r"b\.bin is not text; convert it"):
            read_several(names, choice)


def test_a_gitignore_may_have_a_byte_order_mark_and_comments(tmp_path: Path) -> None:
    write_tree(tmp_path, {".gitignore": "\ufeffsecret.txt\n# * * * * * *\n", "a": "a", "secret.txt": "secret"})
    sources = read_folder(tmp_path, Choice())
    assert (_names(sources), sources.left_out) == (
        ["a"],
        {files.HIDDEN: [".gitignore"], files.IGNORED: ["secret.txt"]},
    )


@pytest.mark.parametrize(
    "path", ["/a", "../a", "a/../b", "a/..", "..", ".", "a//b", "a/", "", "a\nb", "a\x1bb", "\udcff"]
)
def test_no_table_has_a_path_that_leads_out(path: str) -> None:
    assert not is_source_path(path)
    assert is_source_path("a/..b/c d.txt")


def test_a_document_of_one_text_has_no_table() -> None:
    prompt: FixedPrompt = encode_prompt(tiny_tokenizer(), "a text")
    assert prompt.files is None
