"""Tests of the terminal's output of hostile text: no control character reaches the terminal, and no name is markup."""

import json
import shutil
from pathlib import Path

import pytest
from support.command import run_here, sparsekv
from support.short_part import short_part
from support.terminal import on_terminal

from sparsekv.cli.common.streams import json_text, printable
from sparsekv.formats.index.manifest import manifest_bytes, read_manifest

TITLE = "\x1b]0;title\x07"
NAMES = ("a[/x] $x_{$.skv", "notes [draft] :smile:.skv", f"[red]x[/red] {TITLE}.skv")


def test_every_character_that_steers_is_shown() -> None:
    for code in (*range(9), *range(0xB, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)):
        assert printable(f"a{chr(code)}b") == (f"a\\x{code:02x}b" if code < 256 else f"a\\u{code:04x}b")
    assert printable("a\tb\nc\r\nd é 漢 🙂") == "a\tb\nc\r\nd é 漢 🙂"
    assert printable(b"a\xff.skv".decode(errors="surrogateescape")) == "a\\xff.skv"


def test_json_keeps_everything_and_escapes_what_steers() -> None:
    text = "".join(map(chr, [*range(0x100), 0x2028, 0x202E, 0x2066, 0xDCFF, 0x1F642]))
    line = json_text({"text": text})
    assert json.loads(line) == {"text": text}
    assert printable(line) == line
    assert len(line.splitlines()) == 1
    assert "é" in json_text("é")


@pytest.fixture
def hostile(place: Path) -> Path:
    """An index with a model's name and a text that would steer a terminal, and be taken for markup."""
    (place / "doc.txt").write_text((place / "doc.txt").read_text() + "[bold] word\x1b[31m \x9b2J :smile: end. " * 40)
    built = run_here("build-index", "doc.txt", "--model", "model", "--method", "squeezed", "--force", "-q")
    assert built.code == 0, built.stderr
    manifest = read_manifest(place / "doc.skv")
    model = manifest.model.model_copy(update={"id": f"[red]m[/red]{TITLE}"})
    changed = manifest.model_copy(update={"model": model, "created": f"now{TITLE}"})
    (place / "doc.skv" / "manifest.json").write_bytes(manifest_bytes(changed)[0])
    return place


def test_a_manifests_strings_and_a_documents_words_are_shown_as_they_are(hostile: Path) -> None:
    shown = run_here("inspect", "-q", "--model", "model", "--clusters", "30")
    assert shown.code == 0, shown.stderr
    assert printable(shown.stdout) == shown.stdout
    assert "[red]m[/red]\\x1b]0;title\\x07" in shown.stdout
    assert "now\\x1b]0;title\\x07" in shown.stdout
    reported = run_here("recall-report", "-q", "--budget", "0.1", "--method", "squeezed", "--plot", "recall.png")
    assert reported.code == 0, reported.stderr
    assert "[red]m[/red]\\x1b]0;title\\x07" in reported.stdout
    assert printable(reported.stdout) == reported.stdout


@pytest.mark.parametrize("name", short_part(NAMES, every=3))
def test_names_are_neither_markup_nor_mathematics(place: Path, name: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    shutil.move("doc.skv", name)
    reported = ("recall-report", "--budget", "0.1", "--method", "squeezed", "--plot", "plot.png")
    for command in (reported, ("inspect", "--plot", "plot.svg")):
        outcome = run_here(*command, "-i", name, "-q")
        assert outcome.code == 0, outcome.stderr
        assert printable(name) in outcome.stdout
        assert "\x1b" not in outcome.stdout
    assert Path("plot.png").read_bytes().startswith(b"\x89PNG")
    tuned = run_here("tune", "--target-recall", "0.5", "--method", "squeezed", "-i", name, "--dry-run")
    assert tuned.code == 0, tuned.stderr
    assert printable(name) in tuned.stdout
    missing = run_here("generate", "Why?", "-i", f"no {name}")
    assert printable(f"no {name}") in missing.error()


def test_notes_show_names_as_they_are(place: Path) -> None:
    outcome = run_here("inspect", "--plot", f"[b]{TITLE}.png")
    assert outcome.code == 0, outcome.stderr
    assert "plot: [b]\\x1b]0;title\\x07.png\n" in outcome.stderr


def test_an_answer_is_printable_on_a_terminal_and_as_it_is_in_a_pipe(place: Path) -> None:
    """A model of random weights and of single bytes says everything, control characters too."""
    ask = ("generate", "Why?", "--temperature", "5", "--max-new-tokens", "120", "-q")
    said = json.loads(run_here(*ask, "--json").stdout)["text"]
    assert printable(said) != said
    piped = sparsekv(*ask, cwd=place)
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == f"{said}\n"
    assert on_terminal(*ask, cwd=place, columns=1000) == (0, printable(piped.stdout))
