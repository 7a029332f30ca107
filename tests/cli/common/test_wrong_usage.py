"""Tests of the error messages for command lines that typer cannot parse."""

import shlex

import pytest
from support.command import run_here

from sparsekv.cli.common.failures import described_usage

NUMBER = "Invalid value for '--outliers': Input should be a valid number, unable to parse string as a number."
WHOLE = "Invalid value for '--seed': Input should be a valid integer, unable to parse string as an integer."


def test_a_question_without_quotes_and_a_budget_for_a_build_are_told_of() -> None:
    extra = "Got unexpected extra argument(s) (is it)."
    told = described_usage(extra, "generate", ["generate", "--index", "a.skv", "What", "is", "it"])
    assert told == "Got unexpected extra argument(s) (is it); put a question of several words in quotes"
    before = described_usage("No such option: --index", "a.skv", ["--index", "a.skv", "generate", "Why?"])
    assert before == "give --index after the command: `sparsekv generate --index` ..."
    for call in (["--json", "generate", "Why?"], ["--json", "chat", "generate", "Why?"]):
        told = described_usage("No such option: --json", call[1], call)
        assert told == "give --json after the command: `sparsekv generate --json` ..."
    short = described_usage("No such option: -i", "a.skv", ["-i", "a.skv", "generate", "Why?"])
    assert short == "give -i after the command: `sparsekv generate -i` ..."
    nothing = described_usage("No such option: --bogus", "", ["--bogus"])
    assert nothing == "No such option: --bogus; `sparsekv --help` says what there is"
    budget = described_usage("No such option: --budget", "build-index", ["build-index", "a.txt", "--budget", "5%"])
    assert "a budget is given where an index is asked" in budget
    assert "sparsekv generate --budget" in budget


@pytest.mark.parametrize(
    ("message", "arguments", "told"),
    [
        (NUMBER, ["build-index", "doc.txt", "--outliers", "5%"], "--outliers 5%: give a number, such as 0.05"),
        (NUMBER, ["build-index", "doc.txt", "--outliers=many"], "--outliers many: give a number, such as 0.05"),
        (WHOLE, ["eval", "--seed", "1", "--seed", "one"], "--seed one: give a whole number"),
        (WHOLE, ["eval", "-x"], "--seed: give a whole number"),
    ],
)
def test_what_is_no_number_is_told_with_the_number(message: str, arguments: list[str], told: str) -> None:
    assert described_usage(message, arguments[0], arguments) == told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "Why?", "--gpus", "3"], "--gpus stands before the command: `sparsekv --gpus 3 generate` ..."),
        (["build-index", "a", "--gpus=4"], "--gpus stands before the command: `sparsekv --gpus 4 build-index` ..."),
        (["build-index", "a", "--gpus"], "--gpus stands before the command: `sparsekv --gpus 2 build-index` ..."),
        (["chat", "--gpus", "3"], "chat runs as one process; several GPUs are for build-index and generate"),
    ],
)
def test_gpus_behind_a_command_are_told_of_with_their_number(arguments: list[str], told: str) -> None:
    assert described_usage("No such option: --gpus", arguments[0], arguments) == told


@pytest.mark.parametrize("text", ["- What is it?", "-What is it?", "-5 degrees?", "--why?", "-- why"])
def test_a_text_that_begins_with_a_dash_is_given_behind_two(text: str) -> None:
    outcome = run_here("generate", "--index", "a.skv", text)
    assert (outcome.code, outcome.stdout) == (2, "")
    told = f"put -- before it: `sparsekv generate -- {shlex.quote(text)}`"
    assert outcome.error() == f"a text that begins with a dash is taken for an option; {told}"
    assert "no index" in run_here("generate", "--index", "a.skv", "--", text).error()


@pytest.mark.parametrize("command", ["chat", "inspect", "recall-report", "stop"])
def test_a_command_without_such_an_argument_takes_no_text_behind_two_dashes(command: str) -> None:
    told = run_here(command, "- And why?").error()
    assert told == f"{command} takes no text, such as '- And why?'; `sparsekv {command} --help` says what there is"
    assert "unexpected extra argument" in run_here(command, "--", "- And why?").error()


def test_an_option_that_there_is_not_may_have_been_a_question() -> None:
    told = run_here("generate", "-why").error()
    assert told.startswith("No such option: -w; before a question that begins with a dash put --; ")
    assert "put --" not in run_here("generate", "--budgett", "5%").error()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("serve --index a.skv --index b.skv --port 0", "sparsekv serve a.skv b.skv --port 0"),
        ("start -i a.skv", "sparsekv start a.skv"),
        ("convert --index=a.skv", "sparsekv convert a.skv"),
        ("build-index --index a.skv --method quest", "sparsekv build-index a.skv --method quest"),
    ],
)
def test_an_index_that_is_an_argument_is_told_with_the_right_command(arguments: str, told: str) -> None:
    command = arguments.split()[0]
    assert run_here(*arguments.split()).error() == f"{command} takes an index as an argument: `{told}`"


def test_an_option_that_only_shares_letters_is_not_suggested() -> None:
    told = run_here("eval", "doc.txt", "--samples", "5").error()
    assert "did you mean" not in told
    assert "`sparsekv eval --help` says what there is" in told
    assert "(did you mean --contexts?)" in run_here("eval", "doc.txt", "--contxts", "5").error()
    assert "--max-new-tokens" in run_here("eval", "doc.txt", "--tokens", "5").error()
