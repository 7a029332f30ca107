"""Patterns match the paths that git 2.39 matches when it walks a folder."""

import os
import subprocess
from pathlib import Path
from random import Random

import pytest

from sparsekv.formats.documents.files import Choice, read_folder
from sparsekv.formats.documents.ignore_patterns import Patterns
from sparsekv.formats.errors import UsageError

PATHS = ["a", "b", "a/", "b/", "a/b", "a/b/", "a/ab", "a/x/b", "a/x/y/b", "ab", "a.py"]
PATHS += ["a]", "[", "*", "a b", "#", "!", "7"]
NAMES = ["a", "b", "ab", "a b", "a[b]", "a!", "#a", "!b", "a\\b", "b ", "a.txt", "x-y", "A"]
NAMES += ["é", "aé"]
PIECES = ["a", "b", "*", "**", "?", "/", "/", "[ab]", "[!a]", "[^a]", "\\a", "\\*", "\\ ", " ", "!", "#", "\\!", ".txt"]
PIECES += ["[a-b]", "[]a]", "**/", "/**", "/*", "A", "\\\\", "\\[", "[\\]a]", "[[:alpha:]]", "[[:upper:]-]"]
PIECES += ["é", "[é]", "[!é]", "??", "[a-]", "[!-a]", "[[:space:]]", "a//b"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("a", ["a", "a/"]),
        ("/b", ["b", "b/"]),
        ("b/", ["b/", "a/b/"]),
        ("a/b", ["a/b", "a/b/"]),
        ("**/b", ["b", "b/", "a/b", "a/b/", "a/x/b", "a/x/y/b"]),
        ("a/**", ["a/b", "a/b/", "a/ab", "a/x/b", "a/x/y/b"]),
        ("a/*", ["a/b", "a/b/", "a/ab"]),
        ("a/**/b", ["a/b", "a/b/", "a/x/b", "a/x/y/b"]),
        ("a/***/y/b", ["a/x/y/b"]),
        ("a*/b", ["a/b", "a/b/"]),
        ("a/x**b", []),
        ("a[!x]b", ["a b"]),  # a slash is in no set of characters
        ("a[^x]b", ["a b"]),
        ("/a?b", ["a b"]),
        ("/a[ -0]b", ["a b"]),
        ("a[[:space:]]b", ["a b"]),
        ("[[:digit:][:punct:]]", ["[", "*", "#", "!", "7"]),
        ("[^[:alpha:]]", ["[", "*", "#", "!", "7"]),
        ("[]!#]", ["#", "!"]),
        ("a[\\]b]", ["a/ab", "ab", "a]"]),
        ("a[]-b]", ["a/ab", "ab", "a]"]),
        ("[b-a7]", ["b", "b/", "a/b", "a/b/", "a/x/b", "a/x/y/b", "7"]),
        ("[[]", ["["]),
        ("[[:]", ["["]),
        ("\\*", ["*"]),
        ("\\#", ["#"]),
        ("\\!", ["!"]),
        ("#", []),
        ("", []),
        ("/", []),
        ("   ", []),
        ("a b   ", ["a b"]),
        ("a b\\ ", []),
        ("a\t", []),
        ("a//", []),
    ],
)
def test_a_pattern_matches_what_it_matches_in_git(pattern: str, matched: list[str]) -> None:
    patterns = Patterns.of([pattern])
    assert [path for path in PATHS if patterns.ignores(path)] == matched
    assert {patterns.ignores(path) for path in PATHS} <= {True, None}


@pytest.mark.parametrize(
    ("pattern", "path"),
    [("*a" * 30 + "b", "a" * 200), ("**/a*a/" * 30 + "b", "aa/" * 200 + "c"), ("*?" * 30 + "/b", "a" * 200 + "/c")],
)
def test_a_pattern_of_many_stars_ends(pattern: str, path: str) -> None:
    """A stranger's .gitignore must not keep a build busy for years."""
    assert Patterns.of([pattern]).ignores(path) is None
    assert Patterns.of([pattern]).ignores(path[:-1] + "b")


@pytest.mark.parametrize("line", ["!", "!/", "a\\", "[", "a[b", "[]", "[!]", "[\\]", "[[:alpha:]", "[[:letter:]]"])
def test_a_pattern_by_which_git_ignores_nothing_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"nothing after|backslash|without an end|no class"):
        Patterns.of([line])


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        ("docs/", ["docs/", "docs/a.md", "docs/x/b.md"]),
        ("docs/ !docs/a.md", ["docs/", "docs/x/b.md"]),
        ("!docs/a.md docs/", ["docs/", "docs/a.md", "docs/x/b.md"]),
        ("docs/* !docs/", ["docs/a.md", "docs/x/b.md"]),
        ("*.md !x", ["docs/a.md", "docs/x/b.md", "c.md"]),
        ("*.md !c.md", ["docs/a.md", "docs/x/b.md"]),
    ],
)
def test_an_option_chooses_what_is_in_a_folder_that_it_names(patterns: str, chosen: list[str]) -> None:
    paths = ["docs/", "docs/a.md", "docs/x/b.md", "c.md", "d.txt"]
    found = Patterns.of(patterns.split())
    assert [path for path in paths if found.choose(path)] == chosen


def _fill(folder: Path, random: Random, depth: int = 0) -> None:
    folder.mkdir()
    for name in random.sample(NAMES, random.randint(2, 6)):
        if depth < 3 and random.random() < 0.4:
            _fill(folder / name, random, depth + 1)
        else:
            (folder / name).write_text("text")
    if depth == 0 or random.random() < 0.3:
        lines = ("".join(random.choices(PIECES, k=random.randint(1, 4))) for _ in range(random.randint(1, 4)))
        end = random.choice(["\n", "\n", "\r\n"])
        text = random.choice(["", "", "\ufeff"]) + end.join(lines) + end * random.randint(0, 1)
        (folder / ".gitignore").write_bytes(text.encode())


@pytest.mark.parametrize("seed", range(40))
def test_the_files_of_a_folder_are_those_that_git_does_not_ignore(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "folder"
    _fill(folder, Random(seed))
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", "init", "--quiet", folder], check=True, env=environment)
    listed = ["git", "-C", str(folder), "ls-files", "-z", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, env=environment, capture_output=True, text=True).stdout.split("\0")
    try:
        read = [file.path for file in read_folder(folder, Choice()).files]
    except UsageError:  # all files are ignored
        read = []
    assert sorted(read) == sorted(name for name in names if name and not name.endswith(".gitignore"))
