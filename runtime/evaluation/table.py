"""Turns answers into a table: scores and differences from dense attention, each with a confidence interval."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparsekv.runtime.evaluation.answers import Given
from sparsekv.runtime.evaluation.bootstrap import interval, paired_difference
from sparsekv.runtime.evaluation.metrics import METRICS
from sparsekv.runtime.evaluation.tasks import Context, Question
from sparsekv.runtime.selection.budget import Budget


@dataclass(frozen=True)
class Way:
    """How questions are answered: the context's prefill, and the decoding method with variant and budget. No budget
    means dense attention."""

    prefill: str
    method: str
    variant: str = ""
    budget: Budget | None = None

    @property
    def is_dense(self) -> bool:
        """Whether everything is attended."""
        return self.budget is None

    def record(self) -> dict[str, Any]:
        """The fields of a row. A budget is a number there: an int of tokens, or a float of the document."""
        return {**asdict(self), "budget": None if self.budget is None else self.budget.value}


@dataclass(frozen=True)
class Result:
    """One question's answer in one way; `tokens`: those of its context, as it was indexed."""

    context: Context
    question: Question
    way: Way
    given: Given
    tokens: int

    @property
    def score(self) -> float:
        """The score by the question's metric; for a continuation its loss in nats."""
        if self.given.loss is not None:
            return self.given.loss
        return METRICS[self.question.metric].score(self.given.text, self.question)


@dataclass(frozen=True)
class Row:
    """One task at one length in one way: score and difference from dense attention in the metric's unit, with the
    bounds of their 95% intervals. The difference is None for dense attention itself. `length` is what was asked for,
    `tokens` what a context has in the mean: it ends with a sentence, and a text may be shorter."""

    task: str
    length: int | None
    tokens: float
    prefill: str
    method: str
    variant: str
    budget: float | int | None
    metric: str
    unit: str
    contexts: int
    questions: int
    score: float
    score_low: float
    score_high: float
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    kv_fraction: float | None
    seconds: float


@dataclass(frozen=True)
class Cell:
    """Mean score of needles at one length and depth in one way; `depth` is the centre of a bin of width 0.1."""

    task: str
    length: int
    depth: float
    prefill: str
    method: str
    variant: str
    budget: float | int | None
    questions: int
    score: float


def rows(results: Iterable[Result], seed: int = 0) -> list[Row]:
    """The table, grouped by task, length and metric; within a group, ways are in the order of their first result.

    Questions that were not answered in every way of their group are left out, so that all ways are scored on the same.
    """
    groups: dict[tuple[str, int | None, str], list[Result]] = {}
    for result in results:
        key = (result.context.task, result.context.length, result.question.metric)
        groups.setdefault(key, []).append(result)
    return [row for key, group in groups.items() for row in _group(*key, group, seed)]


def _group(task: str, length: int | None, metric: str, results: list[Result], seed: int) -> list[Row]:
    ways: dict[Way, dict[Context, dict[Question, Result]]] = {}
    for result in results:
        ways.setdefault(result.way, {}).setdefault(result.context, {})[result.question] = result
    shared = _shared(list(ways.values()))
    base = next((way for way in ways if way.is_dense), None)
    told = METRICS[metric]
    found = []
    for way, answered in ways.items():
        kept = [[answered[context][question] for question in asked] for context, asked in shared.items()]
        scores = [[result.score for result in one] for one in kept]
        score = interval(scores, told.summary, seed=seed)
        difference = None
        if base is not None and way != base:
            others = [[ways[base][one][question].score for question in asked] for one, asked in shared.items()]
            difference = paired_difference(scores, others, told.summary, seed=seed)
        flat = [result.given for one in kept for result in one]
        found.append(
            Row(
                task=task,
                length=length,
                tokens=_mean([one[0].tokens for one in kept]),
                **way.record(),
                metric=metric,
                unit=told.unit,
                contexts=len(kept),
                questions=len(flat),
                score=score.value,
                score_low=score.low,
                score_high=score.high,
                difference=None if difference is None else difference.value,
                difference_low=None if difference is None else difference.low,
                difference_high=None if difference is None else difference.high,
                kv_fraction=_read([given.kv_fraction for given in flat]),
                seconds=_mean([given.seconds for given in flat]),
            )
        )
    return found


def _shared(ways: list[dict[Context, dict[Question, Result]]]) -> dict[Context, list[Question]]:
    """For each context, the questions that were answered in every way."""
    shared = {}
    for context, asked in ways[0].items():
        kept = [question for question in asked if all(question in way.get(context, {}) for way in ways)]
        if kept:
            shared[context] = kept
    return shared


def cells(results: Iterable[Result]) -> list[Cell]:
    """Mean scores by length and depth, of the questions whose answer has a depth."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for result in results:
        depth, length = result.question.depth, result.context.length
        if depth is not None and length is not None:
            tenth = min(int(10 * depth), 9) / 10 + 0.05
            key = (result.context.task, length, tenth, result.way, METRICS[result.question.metric])
            found.setdefault(key, []).append(result.score)
    return [
        Cell(task, length, depth, **way.record(), questions=len(scores), score=metric.summary(_mean(scores)))
        for (task, length, depth, way, metric), scores in found.items()
    ]


def _read(shares: Sequence[float | None]) -> float | None:
    """The mean of answers that took a step; None where none did."""
    of_steps = [share for share in shares if share is not None]
    return _mean(of_steps) if of_steps else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
