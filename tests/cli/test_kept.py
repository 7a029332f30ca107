"""Tests of warnings before a loss: no index is replaced, and no option ignored, without a message."""

import json
from pathlib import Path

import pytest
from support.command import run_here, shell
from support.tiny_models import save_tiny

from sparsekv.formats.index.manifest import read_manifest

BUILD = ("build-index", "doc.txt", "--model", "model", "-q")


def test_the_index_of_another_document_is_replaced_by_force_alone(place: Path) -> None:
    before = read_manifest(place / "doc.skv")
    (place / "doc.md").write_text("Another text altogether, of other words than the first one has. " * 20)
    refused = run_here("build-index", "doc.md", "--model", "model", "-q")
    told = f"doc.skv is the index of another document ({before.split.tokens:,} tokens): this document has only "
    assert refused.error().startswith(told)
    assert "give --force to replace it" in refused.error()
    assert refused.code == 1
    assert read_manifest(place / "doc.skv") == before
    assert run_here("build-index", "doc.md", "--model", "model", "-q", "--force").code == 0
    assert read_manifest(place / "doc.skv").prompt != before.prompt


def test_another_document_is_told_of_before_what_was_appended(place: Path) -> None:
    assert run_here("append", "-i", "doc.skv", "doc.txt", "--rebuild", "-q").code == 0
    (place / "doc.md").write_text("Another text altogether, of other words than the first one has. " * 20)
    refused = run_here("build-index", "doc.md", "--model", "model", "-q").error()
    assert "doc.skv is the index of another document" in refused
    (place / "doc.md").write_text((place / "doc.txt").read_text()[:80])  # less than a block, of the same document
    refused = run_here("build-index", "doc.md", "--model", "model", "--sinks", "2", "--tail", "2", "-q").error()
    assert "appended tokens, which this document does not have" in refused


def test_another_document_with_the_same_beginning_is_replaced_by_force_alone(place: Path) -> None:
    """As of two files under one licence: more than a block of tokens is the same, which must not be all that counts."""
    beginning = (place / "doc.txt").read_text()[:260]
    (place / "other.txt").write_text(beginning + "Other words follow here, on quite another thing. " * 20)
    before = read_manifest(place / "doc.skv")
    refused = run_here("build-index", "other.txt", "--model", "model", "-q", "-o", "doc.skv")
    assert "doc.skv is the index of another document" in refused.error()
    assert read_manifest(place / "doc.skv") == before
    assert run_here("build-index", "other.txt", "--model", "model", "-q", "-o", "doc.skv", "--force").code == 0
    hashes = read_manifest(place / "doc.skv").prompt.block_hashes
    assert hashes[0] == before.prompt.block_hashes[0]
    assert hashes[-1] != before.prompt.block_hashes[-1]


@pytest.mark.parametrize(
    "line",
    [pytest.param(0, id="first"), pytest.param(12, id="middle", marks=pytest.mark.slow), pytest.param(23, id="last")],
)
def test_a_line_may_be_edited_anywhere(place: Path, line: int) -> None:
    lines = (place / "doc.txt").read_text().splitlines()
    lines[line] = "This line says something else now."
    (place / "doc.txt").write_text("\n".join(lines))
    rebuilt = run_here("build-index", "doc.txt", "--model", "model", "-q")
    assert (rebuilt.code, rebuilt.stdout) == (0, "doc.skv\n"), rebuilt.stderr


def test_what_an_earlier_text_loses_is_told_before_it_is_lost(place: Path) -> None:
    held = read_manifest(place / "doc.skv").split.tokens
    with (place / "doc.txt").open("a") as file:
        file.write("One line more.\n")
    told = run_here("build-index", "doc.txt", "--model", "model").stderr
    line = f"doc.skv holds {held:,} tokens of another text: the first "
    assert told.index(line) < told.index("indexing ")
    assert "tokens of" not in run_here("build-index", "doc.txt", "--model", "model").stderr


def test_how_much_stays_is_told_as_it_is(place: Path) -> None:
    """No stored token of an index in 8 bits stays where its scales were made from less than half of the text."""
    built = run_here("build-index", "doc.txt", "--model", "model", "-o", "int8.skv", "--kv-dtype", "int8")
    assert built.code == 0, built.stderr
    with (place / "doc.txt").open("a") as file:
        file.write("".join(f"And {number} is one line more.\n" for number in range(40)))
    again = run_here("build-index", "doc.txt", "--model", "model", "-o", "int8.skv", "--kv-dtype", "int8")
    assert "tokens of another text: all are replaced" in again.stderr


def test_rounded_rows_of_an_earlier_text_are_told_to_be_replaced(place: Path) -> None:
    """Exact ones never continue them."""
    built = run_here("build-index", "doc.txt", "--model", "model", "-o", "int8.skv", "--kv-dtype", "int8")
    assert built.code == 0, built.stderr
    with (place / "doc.txt").open("a") as file:
        file.write("One line more.\n")
    told = run_here("build-index", "doc.txt", "--model", "model", "-o", "int8.skv").stderr
    assert "of another text, and was built with --kv-dtype int8, which this call does not give: all are" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--max-tokens", "300"), "of this text (this call indexes "),
        (
            ("--sinks", "4"),
            "doc.skv was built with --sinks 10, unlike this call: keys, values and methods",
        ),
        (
            ("--kv-dtype", "int8"),
            "doc.skv was built with --kv-dtype auto, unlike this call: keys, values and methods",
        ),
    ],
)
def test_what_other_settings_replace_is_told_and_no_method_is_lost(
    options: tuple[str, str], told: str, place: Path
) -> None:
    methods = read_manifest(place / "doc.skv").methods
    built = run_here("build-index", "doc.txt", "--model", "model", "--method", "multipole", *options)
    assert built.code == 0, built.stderr
    assert built.stderr.index(told) < built.stderr.index("indexing ")
    assert list(read_manifest(place / "doc.skv").methods) == list(methods)


def test_force_tells_which_methods_are_lost(place: Path) -> None:
    told = run_here("build-index", "doc.txt", "--model", "model", "--method", "multipole", "--force").stderr
    assert "doc.skv is replaced completely, and is then without squeezed (--force)" in told
    assert list(read_manifest(place / "doc.skv").methods) == ["multipole"]


def test_force_takes_the_methods_in_the_order_in_which_they_are_named(place: Path) -> None:
    named = [*reversed(read_manifest(place / "doc.skv").methods)]
    assert len(named) > 1
    given = [word for name in named for word in ("--method", name)]
    assert run_here("build-index", "doc.txt", "--model", "model", *given, "--force", "-q").code == 0
    assert list(read_manifest(place / "doc.skv").methods) == named, "the first one is the default of `generate`"


def test_the_index_for_another_model_is_replaced_by_force_alone(place: Path) -> None:
    before = read_manifest(place / "doc.skv")
    save_tiny(place / "other", "qwen2")
    refused = run_here("build-index", "doc.txt", "--model", "other", "-q")
    assert "doc.skv is an index for another model, " in refused.error()
    assert read_manifest(place / "doc.skv") == before
    assert run_here("build-index", "doc.txt", "--model", "other", "-q", "--force").code == 0
    assert read_manifest(place / "doc.skv").model != before.model


def test_an_edited_document_keeps_its_methods_and_says_what_it_loses(place: Path) -> None:
    assert run_here(*BUILD, "--method", "pqcache", "--pq-bytes", "4").code == 0
    assert run_here("tune", "--target-recall", "0.5", "--method", "quest", "-q").code == 0
    assert read_manifest(place / "doc.skv").defaults is not None
    with (place / "doc.txt").open("a") as file:
        file.write("One line more.\n")
    rebuilt = run_here("build-index", "doc.txt", "--model", "model")
    assert rebuilt.code == 0, rebuilt.stderr
    assert "run `sparsekv tune --index doc.skv --target-recall 0.5 --of 0.05 --method quest` again" in rebuilt.stderr
    methods = read_manifest(place / "doc.skv").methods
    assert set(methods) == {"codes", "multipole", "pqcache", "squeezed"}
    assert methods["pqcache"].parameters["pq_bytes"] == 4


def test_an_answer_is_saved_whose_reader_has_enough(place: Path) -> None:
    ask = "sparsekv generate --model model --max-new-tokens 40 --save-to talk.skv 'What is 3 times 3?'"
    done = shell(f"{ask} | true", place)
    assert done.returncode == 0, done.stderr
    assert "saved talk.skv" in done.stderr
    assert read_manifest(place / "talk.skv").additions


@pytest.mark.parametrize("option", [("--dtype", "float16"), ("--model", "model"), ("--special-tokens",)])
def test_a_report_refuses_what_it_would_not_use(place: Path, option: tuple[str, ...]) -> None:
    refused = run_here("recall-report", "--method", "window", *option)
    assert f"{' '.join(option)} has no effect without --queries" in refused.error()


def test_the_place_of_an_index_is_looked_at_before_a_model_is(place: Path) -> None:
    told = run_here("build-index", "doc.txt", "--model", "no-such-model", "-o", "doc.txt")
    assert "doc.txt is a file, and an index is a folder" in told.error()


def test_a_report_measures_a_method_as_it_is_configured(place: Path) -> None:
    """One form, as its options say; other methods in all their forms."""
    asked = ("recall-report", "--method", "quest", "--method", "squeezed", "--budget", "10%", "--json")
    plain, told = (json.loads(run_here(*asked, *more).stdout)["rows"] for more in ((), ("--page-size", "4")))
    (configured,), (usual,) = ([row for row in rows if row["method"] == "quest"] for rows in (told, plain))
    assert configured["variant"] == "page_size=4"
    assert configured["recall"] > usual["recall"]
    assert [row for row in told if row != configured] == [row for row in plain if row != usual]


def test_a_report_refuses_options_that_no_method_reads(place: Path) -> None:
    assert (
        "--page-size has no effect on window"
        in run_here("recall-report", "--method", "window", "--page-size", "4").error()
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("recall-report", "--plot", "picture"), "--plot picture: the name has no extension; give picture.png"),
        (("recall-report", "--within", "-1"), "--within -1: give a share between 0 and 1"),
        ((*BUILD, "--iterations", "999999999999"), "--iterations 999999999999: give a number from 1 to 10000"),
        ((*BUILD, "--method", "quest"), "no index is built for 'quest'"),
    ],
    ids=["ending", "within", "iterations", "no index"],
)
def test_nonsense_is_told_before_any_work(place: Path, arguments: tuple[str, ...], told: str) -> None:
    outcome = run_here(*arguments)
    assert outcome.error().startswith(told)
    assert outcome.code == 2


def test_pages_longer_than_the_document_are_one_page(place: Path) -> None:
    ask = ("generate", "Why?", "--model", "model", "--max-new-tokens", "2")
    outcome = run_here(*ask, "--method", "quest", "--page-size", "999999999999")
    assert outcome.code == 0, outcome.stderr


def test_help_shows_the_options_of_the_method_that_is_named() -> None:
    plain, quest, every = (
        run_here("generate", *named, "--help").stdout for named in ((), ("--method", "quest"), ("--method", "all"))
    )
    assert "Tokens per page" not in plain
    assert "--page-size" in plain
    assert "Tokens per page" in quest
    assert "--hash-bits" not in quest
    assert all(text in every for text in ("Tokens per page", "Bits of a key's code", "Sampling:"))
    assert len(plain.splitlines()) < len(every.splitlines())


def test_a_template_with_the_time_in_it_keeps_the_head_that_its_index_has(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else the whole document would be prefilled again each time."""
    (place / "model").unlink()
    save_tiny(place / "model")
    template = place / "model" / "chat_template.jinja"
    template.write_text("now {{ strftime_now('%S.%f') }}\n" + template.read_text())
    assert run_here(*BUILD, "--force").code == 0
    before = read_manifest(place / "doc.skv")
    assert before.prompt.chat is not None
    head = before.prompt.chat.before.splitlines()[0]
    again = run_here(*BUILD[:-1])
    assert f"doc.skv keeps the chat template's text before the document from its build: {head!r}, where" in again.stderr
    assert read_manifest(place / "doc.skv") == before
    (place / "doc.txt").write_text((place / "doc.txt").read_text() + "One line more.\n")
    assert run_here(*BUILD).code == 0
    longer = read_manifest(place / "doc.skv").prompt
    assert longer.chat == before.prompt.chat
    assert longer.block_hashes[0] == before.prompt.block_hashes[0]
    assert run_here(*BUILD, "--force").code == 0
    forced = read_manifest(place / "doc.skv").prompt.chat
    assert forced is not None
    assert forced.before != before.prompt.chat.before


@pytest.mark.parametrize(("first", "reason"), [(("--raw",), "--raw"), ((), "a chat template")], ids=["raw", "framed"])
def test_why_the_same_text_is_prefilled_again_is_told(place: Path, first: tuple[str, ...], reason: str) -> None:
    assert run_here(*BUILD, *first, "--force").code == 0
    told = run_here(*BUILD[:-1], *([] if first else ["--raw"])).stderr
    assert f"and was built with {reason}, which this call does not give" in told


@pytest.mark.parametrize("prefill", ["quoka", "dense"])
def test_a_talk_that_is_saved_over_a_sparse_prefill_says_what_becomes_of_it(place: Path, prefill: str) -> None:
    """Its tokens attended to all of the document when they were said."""
    assert run_here(*BUILD, "--prefill", prefill, "--force").code == 0
    said = run_here("generate", "-i", "doc.skv", "What is 3 times 3?", "--max-new-tokens", "3", "--save-to", "talk.skv")
    assert said.code == 0, said.stderr
    told = "questions and answers are prefilled by quoka, as the document was; later answers may differ"
    assert (told in said.stderr) == (prefill == "quoka")
