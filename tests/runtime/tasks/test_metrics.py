"""Metrics against values worked out by hand, and against what the benchmarks say of edge cases."""

import pytest

from sparsekv.runtime.tasks.interface import Question
from sparsekv.runtime.tasks.metrics import METRICS, normalise


def _score(metric: str, answer: str, *expected: str, classes: tuple[str, ...] = ()) -> float:
    return METRICS[metric].score(answer, Question("?", expected, metric, 16, classes=classes))


@pytest.mark.parametrize(
    ("metric", "answer", "expected", "score"),
    [
        ("match-all", " 1234567 and 7654321.", ("1234567", "7654321"), 1.0),
        ("match-all", "1234567", ("1234567", "7654321"), 0.5),
        ("match-all", "It is ABC.", ("abc",), 1.0),
        ("match-all", "", ("abc",), 0.0),
        ("match-part", "1234567", ("1234567", "7654321"), 1.0),
        ("match-part", "none", ("1234567", "7654321"), 0.0),
        # 2 of 3 words of the answer, 2 of 2 expected: 2 * 2 / 5
        ("f1", "the old red house", ("red house",), 0.8),
        ("f1", "The Red-House!", ("redhouse",), 1.0),
        ("f1", "blue", ("red", "a blue one"), 2 / 3),
        ("f1", "red red", ("red",), 2 / 3),
        ("f1", "", ("red",), 0.0),
        ("f1-first-line", "\nred\nblue green", ("red",), 1.0),
        # Scores of ROUGE-L are those of the package that LongBench's code calls.
        # longest common subsequence of 2 words: 2 * 2 / (4 + 3)
        ("rouge-l", "a cat sat here", ("a dog sat",), 4 / 7),
        ("rouge-l", "sat a", ("a sat",), 0.5),
        # each word counts once, and a sentence matches any other
        ("rouge-l", "go go go stop", ("go stop",), 1.0),
        ("rouge-l", "The cat sat. The dog ran.", ("The dog ran. A cat sat.",), 10 / 11),
        # the first sentence has four subsequences of one word; the package takes one that the second has, too
        ("rouge-l", "a b c d", ("d c b a. a d.",), 0.5),
        ("rouge-l", "", ("a sat",), 0.0),
        ("rouge-l-first-line", "a b\nc", ("a b",), 1.0),
        ("retrieval", "Paragraph 3", ("Paragraph 3",), 1.0),
        ("retrieval", "Paragraph 3 or 4", ("Paragraph 3",), 0.5),
        ("retrieval", "Paragraph 30", ("Paragraph 3",), 0.0),
        ("count", "There are 5, maybe 5 or 6", ("5",), 2 / 3),
        ("count", "five", ("5",), 0.0),
        # the first line that is no comment; 3 of 4 + 4 letters are kept: 2 * 3 / 8
        ("code-similarity", "\n# a comment\nabcd", ("abce",), 0.75),
        ("code-similarity", "// only a comment", ("abc",), 0.0),
        # 2 * 2 / 6 is rounded to whole percent
        ("code-similarity", "abc", ("abd",), 0.67),
        ("choice", "The correct answer is (B).", ("B",), 1.0),
        ("choice", "**The correct answer is B**", ("B",), 1.0),
        ("choice", "B", ("B",), 0.0),
        ("substring", "It is 4f-Ab.", ("4f-Ab",), 1.0),
        ("substring", "It is 4f-ab.", ("4f-Ab",), 0.0),
        # the first number counts; decimals count if the expected number has some
        ("number", "about 42, or 43", ("42",), 1.0),
        ("number", "about 43, or 42", ("42",), 0.0),
        ("number", "42.7", ("42",), 1.0),
        ("number", "42.7", ("42.5",), 0.0),
        ("number", "0042.50", ("42.5",), 1.0),
        ("number", "none", ("42",), 0.0),
        ("number", "9007199254740993", ("9007199254740993",), 1.0),
        ("number", "7" * 5000, ("42",), 0.0),
        # any number counts, but no part of one
        ("has-number", "45 - 3 = 42, so 42.", ("42",), 1.0),
        ("has-number", "142, 420 or 4,2", ("42",), 0.0),
        ("option", " B. It is blue", ("green", "B"), 1.0),
        ("option", "Blue", ("Blue", "B"), 1.0),
        ("option", "Clearly B", ("green", "B"), 0.0),  # begins with a letter
        ("option", "green", ("green", "B"), 1.0),
        ("option", "the correct answer is: B", ("green", "B"), 1.0),
        ("option", "the correct answer is C, not B", ("green", "B"), 0.0),
        ("option", "the answer is", ("green", "B"), 0.0),
        ("option", "I think B or C", ("green", "B"), 1.0),
        ("option", "it has no letter", ("green", "B"), 0.0),
        ("option", "", ("green", "B"), 0.0),
        ("choice", "The correct answer is (C).", ("B",), 0.0),
    ],
)
def test_a_score_by_hand(metric: str, answer: str, expected: tuple[str, ...], score: float) -> None:
    assert _score(metric, answer, *expected) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Number of something\nDate", 1.0),
        ("Number of something or Date", 0.5),
        ("Date", 0.0),
        # "Number" is a part of the expected label and does not count as another
        ("Number of something, a Number", 1.0),
    ],
)
def test_a_label_counts_less_beside_others(answer: str, score: float) -> None:
    classes = ("Number", "Number of something", "Date")
    assert _score("classification", answer, "Number of something", classes=classes) == score


def test_normalising_is_squads() -> None:
    assert normalise("  The  U.S.A., an  answer: A-B ") == "usa answer ab"


def test_a_perplexity_is_told_of_the_mean_log_loss() -> None:
    assert METRICS["perplexity"].summary(0.0) == 1.0
    assert METRICS["perplexity"].continuation
    with pytest.raises(TypeError):
        _score("perplexity", "text", "text")
