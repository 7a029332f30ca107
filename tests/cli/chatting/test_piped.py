"""`sparsekv chat` where nobody sits at standard input: every line is a question, and answers alone go to stdout."""

import io
import shutil
import sys
from pathlib import Path

import pytest
import typer
from support.command import fails, run_here, shell, sparsekv

from sparsekv.cli import chat
from sparsekv.cli.chatting.loop import _no_command
from sparsekv.cli.chatting.session import COMMANDS
from sparsekv.formats.errors import UsageError

ASK = ("chat", "--model", "model", "--max-new-tokens", "8")


def test_lines_are_questions_one_after_another(place: Path) -> None:
    """Each question sees the questions before it, and blank lines are no questions."""
    done = sparsekv(*ASK, "-q", cwd=place, stdin="Why?\n\n  \nWhy?")
    assert (done.returncode, done.stderr) == (0, "")
    first = run_here("generate", "Why?", *ASK[1:], "-q").stdout
    assert done.stdout.startswith(first)
    second = done.stdout.removeprefix(first)
    assert second.endswith("\n")
    assert second != first


def test_a_carriage_return_ends_a_line_where_no_newline_does(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(stdin: bytes) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return run_here(*ASK, "-q").stdout

    assert answers(b"Why?\r\rWhy?\r") == answers(b"Why?\n\nWhy?\n")


def test_a_line_is_never_a_command(place: Path) -> None:
    done = sparsekv(*ASK, "-q", cwd=place, stdin="//save talk.skv\nquit\n!multi\n//\n/usr/bin is what?\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (place / "talk.skv").exists()
    first = run_here("generate", "/save talk.skv", *ASK[1:], "-q").stdout
    assert done.stdout.startswith(first)


def test_a_line_that_would_be_a_command_is_refused(place: Path) -> None:
    done = sparsekv(*ASK, "-q", cwd=place, stdin="Why?\n/save talk.skv\n")
    assert (done.returncode, done.stdout) == (2, run_here("generate", "Why?", *ASK[1:], "-q").stdout)
    assert "standard input line 2: /save talk.skv is a command, and commands work only at a terminal" in done.stderr
    assert "; delete the line, or, if it is a question, write //save talk.skv to ask it" in done.stderr
    assert not (place / "talk.skv").exists()


@pytest.mark.parametrize("line", [f"/{name} 2" for name in COMMANDS])
def test_the_option_that_replaces_a_command_is_named_only_if_there_is_one(line: str) -> None:
    name = line.split()[0].removeprefix("/")
    with pytest.raises(UsageError) as raised:
        _no_command(line, 1)
    options = [option for one in typer.main.get_command(chat.app).params for option in one.opts]
    told = f"delete the line and give --{name} instead," if f"--{name}" in options else "delete the line,"
    assert f"line 1: {line} is a command" in str(raised.value)
    assert told in str(raised.value)


def test_dense_attention_talks_as_a_method_does_that_chooses_everything(place: Path) -> None:
    dense, everything = (
        sparsekv(*ASK, "-q", "--method", name, *how, cwd=place, stdin="Why?\nWhat is 7 times 7?\n")
        for name, how in (("dense", ()), ("oracle", ("--budget", "1.0")))
    )
    assert (dense.returncode, dense.stderr) == (0, "")
    assert dense.stdout == everything.stdout


def test_stats_go_to_stderr(place: Path) -> None:
    done = sparsekv(*ASK, "--stats", cwd=place, stdin="Why?\nWhy?\n")
    assert done.stderr.count("prompt tokens, first token after") == 2
    assert "answers by multipole at 10% of the document" in done.stderr
    assert "> " not in done.stdout + done.stderr


def test_a_reader_that_has_enough_ends_it_quietly(place: Path) -> None:
    done = shell("yes 'Why?' | sparsekv chat --model model -q --max-new-tokens 8 | head -1", place)
    assert done.returncode == 141
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("stdin", "told"),
    [
        (b"", "no question: write one question per line to standard input, or run `sparsekv chat` at a terminal"),
        (b"\n \n", "no question"),
        (b"caf\xe9?\n", "standard input line 1 is not text in UTF-8"),
        (b"\xef\xbb\xbfWhy?\ncaf\xe9?\n", "standard input line 2 is not text in UTF-8"),
        ("Why?\n".encode("utf-16"), "standard input is text in UTF-16; convert it to UTF-8, for example with iconv"),
        ("Why?\n".encode("utf-32"), "standard input is text in UTF-32; convert it to UTF-8, for example with iconv"),
        (
            "Why?\n".encode("utf-16-le"),
            "standard input line 1 contains zero bytes, as UTF-16 text does; convert it to UTF-8, for "
            "example with iconv",
        ),
    ],
    ids=["nothing", "blank", "first line", "a later line", "UTF-16", "UTF-32", "UTF-16 without its mark"],
)
def test_what_is_no_question_is_wrong_usage(place: Path, stdin: bytes, told: str) -> None:
    (place / "questions").write_bytes(stdin)
    done = shell("sparsekv chat --model model --max-new-tokens 2 -q < questions", place)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"sparsekv: error: {told}")


def test_a_talk_that_fills_the_model_ends_with_how_to_go_on(place: Path) -> None:
    done = sparsekv(*ASK, "-q", cwd=place, stdin=f"Why?\n{'x' * 4000}\n")
    assert done.returncode == 2
    assert "the model has 4096 positions; " in done.stderr
    assert "or forget the " in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--budget", "lots"), "--budget lots"),
        (("--method", "nope"), "no method 'nope'"),
        (("--method", "quest", "--hash-bits", "4"), "--hash-bits has no effect on quest"),
        (("--temperature", "-1"), "--temperature -1"),
        (("--placement", "nowhere"), "--placement nowhere"),
        (("--prefill-budget", "5%"), "--prefill-budget 5%"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_told_before_a_model_is_loaded(place: Path, options: tuple[str, ...], told: str) -> None:
    fails(2, "chat", "--model", "no-such-model", *options, says=(told,))


def test_residual_needs_centroids(place: Path) -> None:
    built = run_here("build-index", "doc.txt", "--model", "model", "--method", "h2o", "-o", "bare.skv", "-q")
    assert built.code == 0, built.stderr
    fails(2, "chat", "-i", "bare.skv", "--method", "quest", "--residual", says=("--residual needs clusters",))


def test_sources_go_to_stderr(place: Path) -> None:
    done = sparsekv(*ASK, "-q", "--sources", "2", cwd=place, stdin="Why?\nWhy?\n")
    assert done.returncode == 0
    assert [line.partition(":")[0] for line in done.stderr.splitlines()[::2]] == ["source"] * 4
    assert done.stdout == sparsekv(*ASK, "-q", cwd=place, stdin="Why?\nWhy?\n").stdout


def test_a_template_for_one_question_is_told_once(place: Path) -> None:
    shutil.copytree(place / "model", place / "single")
    template = place / "single" / "chat_template.jinja"
    template.write_text("{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}" + template.read_text())
    build = run_here("build-index", "doc.txt", "--model", "single", "-o", "one.skv", "--method", "h2o", "-q")
    assert build.code == 0, build.stderr
    ask = ("chat", "--index", "one.skv", "--model", "single", "--method", "dense", "--max-new-tokens", "2")
    lines = sparsekv(*ask, cwd=place, stdin="Why?\nWho?\nWhen?\n").stderr.splitlines()
    told = [line for line in lines if "template" in line]
    one_question = "the model's chat template allows one question, so later ones follow without the template's text"
    assert told == [one_question]
