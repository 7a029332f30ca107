"""`recall-report --together`: queries that attend to what any of them selects."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from support.command import run_here

REPORT = ("recall-report", "--index", "doc.skv", "--method", "quest", "--budget", "5%", "-q")
QUESTIONS = ("What is 3 times 3?", "Why?", "Which line says that 7 times 7 is 49?", "How many lines are there?")


def rows(*options: str) -> dict[int, dict[str, float]]:
    """By the number of queries together."""
    return rows_of(*REPORT, *options)


def rows_of(*command: str) -> dict[int, dict[str, float]]:
    """The rows that a report prints as JSON, by the number of queries together."""
    outcome = run_here(*command, "--json")
    assert outcome.code == 0, outcome.stderr
    return {row["together"]: row for row in json.loads(outcome.stdout)["rows"]}


@pytest.mark.parametrize("queries", [(), ("--queries", "questions.txt", "--model", "model")], ids=["tail", "questions"])
def test_the_more_share_a_choice_the_less_each_loses(place: Path, queries: tuple[str, ...]) -> None:
    Path("questions.txt").write_text("\n".join(QUESTIONS) + "\n")
    found = rows(*queries, "--together", "1,2,4")
    for fewer, more in pairwise(found[number] for number in (1, 2, 4)):
        assert fewer["selected_tokens"] < more["selected_tokens"] <= 2 * fewer["selected_tokens"]
        assert more["output_error"] < fewer["output_error"]
        assert more["attention_mass"] > fewer["attention_mass"]


def test_rows_of_several_queries_are_not_judged_as_those_of_one(place: Path) -> None:
    """For several queries together, no method is called the best for one query, and the budget is each query's."""
    told = run_here(*REPORT, "--method", "window", "--together", "4").stdout
    assert "--within 0.12 names a method for queries alone; add 1 to --together" in told
    assert "Nothing here reads as little" not in told
    assert "selects more tokens than the budget allows" not in told
    assert "Lowest error at a kv fraction up to 0.12: " in run_here(*REPORT, "--method", "window").stdout


def test_no_more_than_there_are_questions(place: Path) -> None:
    Path("questions.txt").write_text("\n".join(QUESTIONS) + "\n")
    refused = run_here(*REPORT, "--queries", "questions.txt", "--model", "model", "--together", "5")
    assert refused.code == 2
    assert "--together 5: --queries has 4 queries to measure on; give no larger number" in refused.stderr


GUARDED = ("recall-report", "--index", "doc.skv", "--method", "multipole", "--budget", "5%", "--guard", "1%")
ALONE = (
    "queries cannot share a guard, a selection that several steps reuse, or one query's representation of "
    "unselected tokens"
)


def test_variants_that_queries_cannot_share_are_named(place: Path) -> None:
    """Queries cannot share a guard, nor a method that represents unselected tokens for one query alone."""
    told = run_here(*GUARDED, "--method", "magicpig", "--lookup", "flat", "--together", "2", "--json")
    assert told.code == 0, told.stderr
    assert {row["method"] for row in json.loads(told.stdout)["rows"]} == {"multipole"}
    line = f"--together 2 leaves out multipole lookup=flat + guard, magicpig: {ALONE}; add 1 to --together to measure"
    assert line in told.stderr
    told = run_here(*GUARDED, "--lookup", "flat", "--together", "1,2")
    assert f"--together 2 leaves out multipole lookup=flat + guard: {ALONE}\n" in told.stderr
    assert run_here(*GUARDED, "--lookup", "flat", "--together", "1").stderr.count("leaves out") == 0


def test_no_query_takes_the_selection_of_another_question(place: Path) -> None:
    """With --step 2, a question's second step reuses the selection of its first, and nothing can be shared."""
    assert run_here("build-index", "doc.skv", "--method", "csattention", "--model", "model", "-q").code == 0
    Path("questions.txt").write_text("\n".join(QUESTIONS) + "\n")
    searching = (
        "recall-report",
        "--index",
        "doc.skv",
        "--method",
        "csattention",
        "--step",
        "2",
        "--budget",
        "5%",
        "-q",
    )
    assert set(rows_of(*searching, "--together", "1,2")) == {1}
    questions = ("--queries", "questions.txt", "--model", "model")
    refused = run_here(*searching, *questions, "--together", "1,2")
    assert refused.code == 2
    assert f"{ALONE}; leave --together out to measure csattention" in refused.error()
    assert set(rows_of(*searching, *questions)) == {1}


def test_a_number_together_that_leaves_nothing_to_measure_is_refused(place: Path) -> None:
    refused = run_here("recall-report", "--index", "doc.skv", "--method", "magicpig", "--together", "2,4")
    assert refused.code == 2
    assert f"--together 2,4 leaves out magicpig: {ALONE}; add 1 to --together to measure" in refused.error()


def test_more_than_the_tail_has(place: Path) -> None:
    refused = run_here(*REPORT, "--together", "1,999")
    assert refused.code == 2
    assert "--together 1,999: the tail has " in refused.stderr
