"""Commands that messages show run when they are pasted into a shell, whatever the names."""

import re
import shutil
from pathlib import Path

import pytest
from support.command import fails, run_here, shell

from sparsekv.formats.documents.document_hints import tune_hint
from sparsekv.formats.errors import command, is_text
from sparsekv.formats.index.manifest import read_manifest, write_defaults
from sparsekv.formats.index.schema import Defaults, TuneTarget
from sparsekv.formats.models.find import EMBEDDED
from sparsekv.runtime.selection.interface import Budget

BUILD = ("build-index", "doc.txt", "--model", "model", "-q")
SHOWN = re.compile(r"`(sparsekv [^`]+)`")


def shown(text: str) -> list[str]:
    """The commands in a message."""
    return SHOWN.findall(text)


def paste(text: str, cwd: Path) -> None:
    """Runs the one command that a message shows."""
    (pasted,) = shown(text)
    done = shell(pasted, cwd)
    assert done.returncode == 0, (pasted, done.stderr)


@pytest.fixture
def spaced(place: Path) -> Path:
    """An index and its document whose names a shell would take apart, and a few options that are not the defaults."""
    Path("my doc.txt").write_text(Path("doc.txt").read_text())
    build = ("build-index", "my doc.txt", "-o", "it's.skv", "--model", "model", "--method", "multipole", "-q")
    outcome = run_here(*build, "--max-tokens", "600", "--sinks", "4", "--tail", "64", "--raw")
    assert outcome.code == 0, outcome.stderr
    return place


@pytest.mark.usefixtures("longer")
def test_a_report_shows_how_answers_of_an_index_built_otherwise_are_evaluated() -> None:
    """With the options that it was built with, for `eval` builds indices of its own."""
    assert run_here(*BUILD, "-o", "other.skv", "--method", "multipole", "--outliers", "0.05").code == 0
    (evaluated,) = shown(run_here("recall-report", "-i", "other.skv", "--method", "multipole").stdout)
    assert "--method multipole --outliers 0.05" in evaluated


@pytest.mark.usefixtures("longer")
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_document_with_a_byte_order_mark_is_found_beside_its_index(encoding: str) -> None:
    assert run_here(*BUILD, "-o", "doc.skv", "--method", "multipole").code == 0
    Path("doc.txt").write_bytes(Path("doc.txt").read_text().encode(encoding))
    (evaluated,) = shown(run_here("recall-report", "-i", "doc.skv", "--method", "multipole").stdout)
    assert evaluated.startswith("sparsekv eval doc.txt ")


def test_a_method_that_is_missing_is_added_with_all_that_the_index_was_built_with(spaced: Path) -> None:
    before = read_manifest(Path("it's.skv"))
    refused = run_here("recall-report", "-i", "it's.skv", "--method", "squeezed")
    assert refused.code == 2
    paste(refused.error(), spaced)
    after = read_manifest(Path("it's.skv"))
    assert {*before.methods} | {"squeezed"} == {*after.methods}
    for field in ("prompt", "split", "dtype", "prefill", "model"):
        assert getattr(before, field) == getattr(after, field)


def test_a_method_is_added_where_the_document_is_gone(spaced: Path) -> None:
    Path("my doc.txt").unlink()
    Path("doc.txt").unlink()  # the same text
    for asked in (("generate", "Why?"), ("recall-report",), ("tune", "--target-recall", "0.5")):
        message = run_here(*asked, "-i", "it's.skv", "--method", "codes").error()
        assert shown(message) == ["sparsekv build-index 'it'\"'\"'s.skv' --method codes"]
    paste(message, spaced)


def test_a_residual_that_needs_another_method(place: Path) -> None:
    assert run_here(*BUILD, "-o", "h.skv", "--method", "h2o").code == 0
    paste(run_here("recall-report", "-i", "h.skv", "--residual").error(), place)
    assert run_here("recall-report", "-i", "h.skv", "--residual", "--method", "quest", "-q").code == 0


def test_a_command_that_builds_an_index_of_a_short_text_is_not_refused(place: Path) -> None:
    """The default tail is longer than a short text."""
    for text in ("doc.txt", "questions.txt"):
        (place / text).unlink(missing_ok=True)
    shutil.rmtree("doc.skv")
    Path("short.txt").write_text("A text of a few words, which is shorter than the default tail.\n" * 2)
    for given in ((), ("--index", "short.skv"), ("--index", "short.txt")):
        (told,) = shown(run_here("generate", "Why?", *given).error())
        built = run_here(*told.split()[1:], "--model", "model", "--force", "-q")
        assert built.code == 0, built.stderr
        shutil.rmtree("short.skv")


@pytest.mark.parametrize("command", [("generate", "Why?"), ("inspect",), ("recall-report",), ("append", "doc.txt")])
def test_a_text_in_the_place_of_an_index(place: Path, command: tuple[str, ...]) -> None:
    beside = "name the index beside it, doc.skv"
    fails(2, *command, "--index", "doc.txt", says=("doc.txt is a text, not an index", beside))
    shutil.rmtree("doc.skv")
    message = run_here(*command, "--index", "doc.txt").error()
    assert shown(message) == ["sparsekv build-index doc.txt"]


MISSING = [
    ("generate", "Why?"),
    ("append", "doc.txt"),
    ("inspect",),
    ("recall-report",),
    ("tune", "--target-recall", "0.5"),
    ("bench",),
]


@pytest.mark.parametrize("command", MISSING, ids=lambda command: command[0])
def test_every_command_exits_alike_where_no_index_is(place: Path, command: tuple[str, ...]) -> None:
    Path("folder").mkdir()
    fails(2, *command, "--index", "none.skv", says=("no index at none.skv", "`sparsekv build-index --help`"))
    fails(2, *command, "--index", "folder", says=("folder is a folder, but no index", "`sparsekv build-index doc.txt`"))
    Path("doc").mkdir()
    fails(2, *command, "--index", "doc", says=("doc is a folder, but no index", "name the index beside it, doc.skv"))
    shutil.rmtree("doc.skv")
    fails(2, *command, "--index", "doc.skv", says=("no index", "`sparsekv build-index doc.txt -o doc.skv`"))
    if command[0] != "bench":  # which without an index times a mixture
        fails(2, *command, says=("no index in this folder", "`sparsekv build-index doc.txt`"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a" * 4095 + "é".encode(), True),
        (b"a" * 4095 + b"\xff" * 9, False),
        (b"\0" * 4095 + "é".encode(), False),
        (b" " * 4095 + "é".encode(), False),
        (b"a" * 99 + b"\xc3", False),
    ],
    ids=["cut", "invalid", "zeros", "blank", "incomplete"],
)
def test_a_character_that_is_cut_at_4_kib_does_not_make_a_file_a_text(
    tmp_path: Path, content: bytes, expected: bool
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert is_text(file) == expected


@pytest.mark.parametrize(
    ("value", "of", "written"),
    [
        (0.5, 1.0, "--target-recall 0.5 --of 1.0"),  # `--of 1` is one token
        (0.5, 1_234_567, "--target-recall 0.5 --of 1234567"),
        (0.9999999, 0.05, "--target-recall 0.9999999 --of 0.05"),
    ],
)
def test_a_shown_target_is_the_same_target(value: float, of: float, written: str) -> None:
    shown_target = TuneTarget(measure="recall", value=value, of=of)
    assert tune_hint(Path("doc.skv"), shown_target) == f"`sparsekv tune --index doc.skv {written}`"
    assert Budget.parse(written.split()[-1]) == Budget(of)


def test_tune_is_shown_with_its_target_where_its_default_is_gone(place: Path) -> None:
    manifest = read_manifest(place / "doc.skv")
    target = TuneTarget(measure="recall", value=0.3, of=0.1)
    defaults = Defaults(
        method="gone",
        variant="",
        parameters={},
        budget=0.5,
        layer_budgets=None,
        residual=False,
        target=target,
        calibration=0.4,
        held_out=0.4,
        kv_fraction=0.6,
    )
    write_defaults(place / "doc.skv", manifest, defaults)
    message = run_here("generate", "Why?", "--model", "model").error()
    assert shown(message) == ["sparsekv tune --index doc.skv --target-recall 0.3 --of 0.1"]
    paste(message, place)


def test_names_are_quoted_and_never_options() -> None:
    assert command("build-index", Path("-a b.txt")) == "`sparsekv build-index './-a b.txt'`"


def test_a_report_shows_how_answers_are_evaluated(place: Path) -> None:
    """With a length that its document has, also where only its beginning is indexed; and stored as it is."""
    Path("long.txt").write_text(Path("doc.txt").read_text() * 2)
    for options in ((), ("--max-tokens", "600", "--kv-dtype", "int8")):
        assert run_here("build-index", "long.txt", "--model", "model", "--method", "squeezed", "-q", *options).code == 0
        report = run_here("recall-report", "-i", "long.skv", "--method", "squeezed", "--budget", "5%", "-q")
        (hint,) = shown(report.stdout)
        assert hint.startswith("sparsekv eval long.txt --method squeezed --model ")
        assert ("--kv-dtype int8" in hint) == ("int8" in options)
        done = shell(f"{hint} --contexts 1 --questions 1 --max-new-tokens 2 -q", place)
        assert done.returncode == 0, done.stderr
        shutil.rmtree("long.skv")


def test_what_keeps_answers_from_being_evaluated_is_told(place: Path) -> None:
    report = ("recall-report", "--method", "window", "--budget", "5%", "-q")
    assert run_here("build-index", "doc.txt", "-o", "few.skv", "--model", "model", "--max-tokens", "500").code == 0
    assert "`sparsekv eval --help` (this text is too short)" in run_here(*report, "-i", "few.skv").stdout
    Path("more.txt").write_text("One more line.\n")
    assert run_here("append", "-i", "doc.skv", "more.txt", "--rebuild", "-q").code == 0
    told = run_here(*report, "-i", "doc.skv").stdout
    assert "`sparsekv eval --help` (no file here has the text as it is indexed)" in told


def test_eval_of_an_index_is_shown_with_its_text(longer: Path) -> None:
    assert run_here(*BUILD).code == 0
    calls = (("--index", "doc.skv"), ("-i", "doc.skv"), ("--index=doc.skv",), ("doc.skv",))
    hints = {hint for call in calls for hint in shown(run_here("eval", *call).error())}
    (hint,) = hints
    assert hint.startswith("sparsekv eval doc.txt --model ")
    done = shell(f"{hint} --contexts 1 --questions 1 --max-new-tokens 2 --method quest --budget 9 -q", longer)
    assert done.returncode == 0, done.stderr
    shutil.rmtree("doc.skv")
    Path("doc.txt").unlink()
    assert [run_here("eval", *call).code for call in calls] == [2] * len(calls)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("recal-report",), "recall-report"),
        (("recall-report", "--method", "multipool"), "multipole"),
        (("build-index", "doc.txt", "--method", "squeesed"), "squeezed"),
        (("generate", "Why?", "--placement", "devise"), "device"),
        (("generate", "Why?", "--method", "densse"), "dense"),
        (("generate", "Why?", "--prefill", "densse"), "dense"),
        (("eval", "doc.txt", "--method", "densse"), "dense"),
        (("generate", "Why?", "--lookup", "hierarchicl"), "hierarchical"),
        (("tune", "--target-recall", "0.5", "--cheapest", "tim"), "time"),
        (("eval", "doc.txt", "--task", "niah-singel"), "niah-single"),
        (("generate", "Why?", "--bugdet", "5%"), "--budget"),
        (("recall-report", "--methods", "codes"), "--method"),
        (("build-index", "doc.txt", "--methods=codes"), "--method"),
        (("bench", "--methods", "codes"), "--method"),
        (("generate", "Why?", "--top_k", "3"), "--top-k"),
        (("generate", "Why?", "--device-map", "auto"), "--device"),
        (("tune", "--target", "0.5"), "--target-recall, --target-error or --target-perplexity"),
        (("build-index", "doc.txt", "--model", "smollm"), EMBEDDED),
        (("build-index", "doc.txt", "--model", "HuggingFaceTB/SmolLM2-135M-Instruct"), EMBEDDED),
    ],
)
def test_what_was_meant_is_suggested(place: Path, arguments: tuple[str, ...], meant: str) -> None:
    fails(2, *arguments, says=(f"(did you mean {meant}?)",))


def test_a_misspelt_budget_of_a_build_is_told_as_a_budget_is(place: Path) -> None:
    """No option of a build is meant: one of them, --prefill-budget, is only named alike."""
    fails(2, "build-index", "doc.txt", "--bugdet", "5%", says=("a budget is given where an index is asked",))


def test_nothing_is_suggested_where_nothing_is_near(place: Path) -> None:
    for options in (("--bogus",), ("--out", "x")):
        assert "did you mean" not in run_here("recall-report", *options).error()
    assert "did you mean" not in run_here("recall-report", "--method", "xyz").error()
    message = run_here("build-index", "doc.txt", "--model", "xyz").error()
    assert "did you mean" not in message
    assert f"or take {EMBEDDED}, which needs no hub" in message


def test_an_index_whose_name_is_nearly_right_is_suggested(place: Path) -> None:
    for name in ("manual.skv", "notes.skv"):
        Path(name).mkdir()
    fails(2, "generate", "Why?", "--index", "manul.skv", says=("no index at manul.skv", "(did you mean manual.skv?)"))


def test_an_index_of_another_name_is_not_suggested_for_its_ending(place: Path) -> None:
    message = run_here("generate", "-i", "far.skv", "Why?").error()
    assert "did you mean" not in message


def test_dense_attention_is_no_method_to_compare(place: Path) -> None:
    says = ("dense attention is the baseline with which all methods are compared",)
    fails(2, "recall-report", "--method", "dense", says=says)
    fails(2, "tune", "--target-recall", "0.5", "--method", "dense", says=("leave it out",))


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(place: Path) -> None:
    told = run_here("build-index", "doc.txt", "-o", "new.skv", "--model", "./nowhere").error()
    assert told.startswith("model './nowhere' names a folder that does not exist; check its spelling, or take ")


def test_a_text_that_is_too_long_is_told_what_fits(place: Path) -> None:
    (place / "long.txt").write_text((place / "doc.txt").read_text() * 7)
    told = run_here("build-index", "long.txt", "--model", "model").error()
    (fits,) = re.findall(r"--max-tokens (\d+)", told)
    assert run_here("build-index", "long.txt", "--model", "model", "--max-tokens", fits, "-q").code == 0
    assert run_here("generate", "-i", "long.skv", "Why?", "--max-new-tokens", "1", "--model", "model").code == 0
