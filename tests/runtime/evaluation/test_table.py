"""From answers to rows: the same questions for all, differences by pairs, cells by depth."""

import math
from dataclasses import replace

import pytest

from sparsekv.runtime.evaluation.table import Result, ScoredAnswer, Variant, cells, expecting_dense, rows
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.tasks.interface import Context, Question, in_turns

DENSE, QUEST = Variant("dense", "dense"), Variant("dense", "quest", "", Budget(0.05))


def _context(name: str, *depths: float, metric: str = "match-all", length: int = 1000) -> Context:
    asked = tuple(Question(f"{name} {depth}", ("yes",), metric, 8, depth=depth) for depth in depths)
    return Context("niah", name, "text", asked, length)


def _result(context: Context, number: int, way: Variant, text: str, loss: float | None = None) -> Result:
    return Result(
        context, context.questions[number], way, ScoredAnswer(text, loss, 1.0 if way == DENSE else 0.1, 2.0), 100
    )


def test_scores_and_differences() -> None:
    one, two = _context("one", 0.1, 0.9), _context("two", 0.5)
    results = [
        _result(one, 0, DENSE, "yes"),
        _result(one, 1, DENSE, "yes"),
        _result(two, 0, DENSE, "no"),
        _result(one, 0, QUEST, "no"),
        _result(one, 1, QUEST, "yes"),
        _result(two, 0, QUEST, "no"),
    ]
    dense, quest = rows(results)
    assert (dense.score, quest.score) == pytest.approx((200 / 3, 100 / 3))
    assert (dense.difference, quest.difference) == (None, pytest.approx(-100 / 3))
    assert quest.difference_low is not None
    assert quest.difference_high is not None
    assert quest.difference_low <= -100 / 3 <= quest.difference_high <= 0
    assert (quest.contexts, quest.questions, quest.kv_fraction, quest.seconds) == (2, 3, pytest.approx(0.1), 2.0)


def test_all_prefills_are_compared_with_dense_attention_after_the_first() -> None:
    """So a row of another prefill has the loss of prefill and method together."""
    one, ways = (
        _context("one", 0.1, 0.5, 0.9),
        (DENSE, QUEST, replace(DENSE, prefill="quoka"), replace(QUEST, prefill="quoka")),
    )
    texts = [("yes", "yes", "yes"), ("yes", "yes", "no"), ("yes", "no", "no"), ("no", "no", "no")]
    answers = zip(ways, texts, strict=True)
    found = rows([_result(one, n, way, text) for way, all_of in answers for n, text in enumerate(all_of)])
    assert [row.difference for row in found] == [None, *map(pytest.approx, (-100 / 3, -200 / 3, -100))]
    assert [row.same_as_dense for row in found] == [None, *map(pytest.approx, (200 / 3, 100 / 3, 0))]


def test_answers_with_the_text_of_dense_attentions_are_counted() -> None:
    """Whether they are right or not. Continuations have no text."""
    one = _context("one", 0.1, 0.5, 0.9)
    texts = {DENSE: ("yes", "no", "yes"), QUEST: ("yes", "no", "yes, yes")}
    dense, quest = rows([_result(one, n, way, text) for way, all_of in texts.items() for n, text in enumerate(all_of)])
    assert (dense.same_as_dense, quest.same_as_dense) == (None, pytest.approx(200 / 3))
    other = _context("one", 0.1, metric="perplexity")
    assert [row.same_as_dense for row in rows([_result(other, 0, way, "", 1.0) for way in texts])] == [None, None]


def test_long_answers_are_compared_with_dense_attentions_up_to_the_first_difference() -> None:
    """The score is a share of the longer answer's words. Dense attention's own answer is the measure, over any
    prefill."""
    one, two = (_context(name, 0.1, metric="same-start") for name in ("one", "two"))
    longer = replace(QUEST, prefill="quoka")
    texts = {DENSE: ("a b c d", ""), QUEST: ("a b x d", ""), longer: ("a b c d e f g h", "a")}
    results = [_result(context, 0, way, texts[way][n]) for way in texts for n, context in enumerate((one, two))]
    assert [row.score for row in rows(expecting_dense(results))] == pytest.approx([100, (50 + 100) / 2, (50 + 0) / 2])
    assert [row.difference for row in rows(expecting_dense(results))] == [None, pytest.approx(-25), pytest.approx(-75)]


def test_turns_have_rows_of_their_own() -> None:
    """Paired by question, as the rows of all turns, which come first."""
    one, two = (in_turns(_context(name, 0.1, 0.9)) for name in ("one", "two"))
    texts = {DENSE: ("yes", "yes"), QUEST: ("yes", "no")}
    found = rows([_result(context, n, way, texts[way][n]) for context in (one, two) for way in texts for n in (0, 1)])
    assert [(row.turn, row.method, row.questions, row.score, row.difference) for row in found] == [
        (None, "dense", 4, 100, None),
        (None, "quest", 4, 50, -50),
        (1, "dense", 2, 100, None),
        (1, "quest", 2, 100, 0),
        (2, "dense", 2, 100, None),
        (2, "quest", 2, 0, -100),
    ]


def test_one_question_has_no_interval() -> None:
    context = _context("one", 0.1)
    dense, quest = rows([_result(context, 0, DENSE, "yes"), _result(context, 0, QUEST, "no")])
    assert (dense.score, dense.score_low, dense.score_high) == (100.0, None, None)
    assert (quest.difference, quest.difference_low, quest.difference_high) == (-100.0, None, None)


def test_answers_that_are_all_right_are_no_certainty() -> None:
    """Of two right answers, at least 15.8% of others are right. Perplexities have no highest value, so no bound."""
    one = _context("one", 0.1, 0.9)
    dense, quest = rows([_result(one, n, way, "yes") for way in (DENSE, QUEST) for n in (0, 1)])
    for row in (dense, quest):
        assert (row.score_low, row.score_high) == (pytest.approx(100 * 0.025**0.5), 100)
    assert (quest.difference_low, quest.difference_high) == pytest.approx((-84.2, 84.2), abs=0.1)
    other = _context("one", 0.1, 0.9, metric="perplexity")
    _, lost = rows([_result(other, n, way, "", 1.0 + n) for way in (DENSE, QUEST) for n in (0, 1)])
    assert lost.score_low < lost.score_high
    assert (lost.difference, lost.difference_low, lost.difference_high) == (0, None, None)


def test_dense_attentions_own_answers_score_alike_by_definition() -> None:
    one = _context("one", 0.1, 0.9, metric="same-start")
    dense, quest = rows(expecting_dense([_result(one, n, way, "a") for way in (DENSE, QUEST) for n in (0, 1)]))
    assert (dense.score, dense.score_low, dense.score_high) == (100, None, None)
    assert (quest.score, quest.score_low) == (100, pytest.approx(100 * 0.025**0.5))


def test_a_question_that_one_way_lacks_counts_for_none() -> None:
    context = _context("one", 0.1, 0.9)
    results = [
        _result(context, 0, DENSE, "yes"),
        _result(context, 1, DENSE, "no"),
        _result(context, 0, QUEST, "yes"),
    ]
    assert [(row.questions, row.score) for row in rows(results)] == [(1, 100.0), (1, 100.0)]


def test_a_question_that_is_asked_twice_counts_twice_in_rows_and_cells() -> None:
    one = _context("one", 0.1, 0.1, 0.15)
    texts = {DENSE: ("yes", "yes", "no"), QUEST: ("yes", "yes", "yes")}
    results = [_result(one, n, way, text) for way, all_of in texts.items() for n, text in enumerate(all_of)]
    for found in (rows(results), cells(results)):
        assert [(row.questions, row.score) for row in found] == [(3, pytest.approx(200 / 3)), (3, 100)]


def test_lengths_are_told_apart() -> None:
    short, long = _context("one", 0.1), _context("one", 0.1, length=2000)
    found = rows([_result(short, 0, DENSE, "yes"), _result(long, 0, DENSE, "no")])
    assert [(row.length, row.score) for row in found] == [(1000, 100.0), (2000, 0.0)]


def test_the_tokens_of_contexts_are_told_beside_the_length_that_was_asked_for() -> None:
    one, two = _context("one", 0.1, 0.9), _context("two", 0.5)
    results = [replace(_result(context, 0, DENSE, "yes"), tokens=has) for context, has in ((one, 990), (two, 951))]
    assert [(row.length, row.tokens) for row in rows(results)] == [(1000, 970.5)]


def test_perplexities_are_of_mean_losses() -> None:
    context = _context("one", 0.1, 0.9, metric="perplexity")
    losses = {DENSE: (1.0, 2.0), QUEST: (1.5, 2.5)}
    results = [_result(context, n, way, "", loss) for way, both in losses.items() for n, loss in enumerate(both)]
    dense, quest = rows(results)
    assert dense.score == pytest.approx(math.exp(1.5))
    assert quest.difference == pytest.approx(math.exp(2.0) - math.exp(1.5))


def test_cells_are_tenths_of_the_depth() -> None:
    context = _context("one", 0.11, 0.19, 0.2, 1.0)
    results = [_result(context, n, DENSE, text) for n, text in enumerate(("yes", "no", "yes", "no"))]
    found = [(round(cell.depth, 2), cell.questions, cell.score) for cell in cells(results)]
    assert found == [(0.15, 2, 50.0), (0.25, 1, 100.0), (0.95, 1, 0.0)]


def test_cells_are_of_the_wanted_depths_where_these_are_few() -> None:
    """Needles that were to be at one depth lie between sentences around it, on both sides of a border of two bins."""
    context = _context("one", 0.498, 0.503, 0.897)
    asked = [replace(one, placed=at) for one, at in zip(context.questions, (0.5, 0.5, 0.9), strict=True)]
    few = replace(context, questions=tuple(asked))
    texts = ("yes", "no", "yes")
    found = cells([_result(few, number, DENSE, text) for number, text in enumerate(texts)])
    assert [(cell.depth, cell.questions, cell.score) for cell in found] == [(0.5, 2, 50.0), (0.9, 1, 100.0)]
    many = _context("many", *(number / 30 for number in range(30)))
    spread = replace(many, questions=tuple(replace(one, placed=one.depth) for one in many.questions))
    assert len(cells([_result(spread, number, DENSE, "yes") for number in range(30)])) == 10


def test_one_token_and_everything_are_two_ways() -> None:
    context = _context("one", 0.1)
    token, everything = (Variant("dense", "quest", "", Budget.parse(text)) for text in ("1", "100%"))
    results = [_result(context, 0, way, text) for way, text in ((DENSE, "yes"), (token, "no"), (everything, "yes"))]
    _, few, whole = rows(results)
    assert (few.budget, type(few.budget), few.score) == (1, int, 0.0)
    assert (whole.budget, type(whole.budget), whole.score) == (1.0, float, 100.0)
    assert [(type(cell.budget), cell.score) for cell in cells(results)[1:]] == [(int, 0.0), (float, 100.0)]
