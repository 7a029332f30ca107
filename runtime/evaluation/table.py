"""Storage of answers on disk, and the table of their scores with confidence intervals."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.tasks.interface import Context, Question
from sparsekv.runtime.tasks.metrics import METRICS

Scores = Sequence[Sequence[float]]
"""Scores by context, then by question."""

REPLICATES = 4000
ROUNDING = 1e-9
"""Largest spread of replicates of equal means, relative to the mean: that of rounding."""
Limits = tuple[float, float]
"""The lowest and the highest possible score of a question."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% confidence interval.

    `low` and `high` are None for an estimate from one question, and for one from equal scores without limits.
    """

    value: float
    low: float | None
    high: float | None


def interval(
    scores: Scores, summary: Callable[[float], float] = float, *, limits: Limits | None = None, seed: int = 0
) -> Interval:
    """Compute the confidence interval of the mean over all questions, by bootstrap.

    Equal scores have no spread for a bootstrap. Their interval is an exact binomial one if the scores have limits.

    Args:
        summary: increasing function of the mean. The value and the interval of this function are returned.
        limits: limits of the scores; None if there are none.
    """
    value = summary(_mean_score(scores))
    if _is_single(scores):
        return Interval(value, None, None)
    ends = None if limits is None else (summary(limits[0]), summary(limits[1]))
    return _interval(value, np.vectorize(summary)(_means([scores], seed)[0]), sum(map(len, scores)), ends)


def paired_difference(
    scores: Scores,
    baseline: Scores,
    summary: Callable[[float], float] = float,
    *,
    limits: Limits | None = None,
    seed: int = 0,
) -> Interval:
    """Compute the confidence interval of the difference of two means, scores minus baseline, on the same questions.

    Each bootstrap replicate draws the same questions for both means, so that a question's difficulty cancels. Equal
    differences have the interval that `interval` gives equal scores.

    Args:
        summary: increasing function that is applied to each of the two means before the difference is taken.
        limits: limits of both scores; None if there are none.

    Raises:
        ValueError: `scores` and `baseline` differ in the number of contexts, or of questions of a context.
    """
    if [len(one) for one in scores] != [len(one) for one in baseline]:
        raise ValueError("paired scores must be of the same questions")
    told, value = np.vectorize(summary), summary(_mean_score(scores)) - summary(_mean_score(baseline))
    if _is_single(scores):
        return Interval(value, None, None)
    means, others = _means([scores, baseline], seed)
    most = None if limits is None else summary(limits[1]) - summary(limits[0])
    return _interval(value, told(means) - told(others), sum(map(len, scores)), None if most is None else (-most, most))


def _is_single(scores: Scores) -> bool:
    """Whether the scores are of one question. Every bootstrap replicate of one question is that question."""
    return sum(map(len, scores)) == 1


def _mean_score(scores: Scores) -> float:
    return float(np.mean(np.concatenate([np.asarray(one, float) for one in scores])))


def _interval(value: float, replicates: NDArray[np.float64], questions: int, limits: Limits | None) -> Interval:
    """Return the interval of a mean from its bootstrap replicates, or of equal values between limits."""
    if np.ptp(replicates) > ROUNDING * max(1.0, abs(value)):
        low, high = np.quantile(replicates, [0.025, 0.975])
        return Interval(value, float(low), float(high))
    if limits is None:
        return Interval(value, None, None)
    # Clopper and Pearson's bound on the share of other questions that are lower, or higher, though no question was.
    unseen = 1 - 0.025 ** (1 / questions)
    return Interval(value, value - unseen * (value - limits[0]), value + unseen * (limits[1] - value))


def _means(paired: Sequence[Scores], seed: int) -> list[NDArray[np.float64]]:
    """Return bootstrap means [replicates] for each set of scores in `paired`.

    A replicate draws contexts and their questions with replacement, the same draws for all of `paired`.
    """
    sizes = np.array([len(one) for one in paired[0]])
    tables = [np.zeros((len(sizes), sizes.max())) for _ in paired]
    for table, scores in zip(tables, paired, strict=True):
        for row, one in zip(table, scores, strict=True):
            row[: len(one)] = one
    random = np.random.default_rng(seed)
    drawn = random.integers(len(sizes), size=(REPLICATES, len(sizes)))
    count = sizes[drawn]
    questions = (random.random((*drawn.shape, sizes.max())) * count[..., None]).astype(np.int64)
    inside = np.arange(sizes.max()) < count[..., None]
    return [(table[drawn[..., None], questions] * inside).sum((1, 2)) / count.sum(1) for table in tables]


FILE, BEGINNING = "answers.jsonl", b'{"key": "'
"""The name of the file of answers, and the beginning of each of its lines."""


@dataclass(frozen=True)
class ScoredAnswer:
    """A model's answer to one question: a text, or for a continuation the mean loss per token, in nats.

    `kv_fraction` is None for a one-token answer by a sparse method, because such an answer needs no decode step.
    `seconds` is the time of the question's prefill and of the answer.
    """

    text: str
    loss: float | None
    kv_fraction: float | None
    seconds: float


class Answers:
    """Stores answers by key in a folder. Use it as a context manager; only one process at a time can open a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = FileLock(folder / f".{FILE}.lock", timeout=0)
        self._file: IO[bytes] | None = None
        self.known: dict[str, ScoredAnswer] = {}

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._file = self._path.open("a+b")
            self._load(self._file)
        except Timeout:
            raise SparsekvError(
                f"{self._path.parent} is in use by another run; wait until that run ends, or give another folder "
                "with --work"
            ) from None
        except OSError as error:
            raise SparsekvError(f"cannot write {self._path}: {error.strerror or error}; give another --work") from None
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if self._file is not None:
                with suppress(OSError):  # the disk is full; `add` has already raised an error for that
                    self._file.close()
        finally:
            self._lock.release()

    def add(self, key: str, answer: ScoredAnswer, details: dict[str, Any]) -> None:
        """Write an answer to disk at once (fsync). `details` has additional fields, for people who read the file.

        Raises:
            SparsekvError: the file cannot be written, for example because the disk is full.
        """
        self._append(json.dumps({"key": key, **asdict(answer), **details}, ensure_ascii=False).encode() + b"\n")
        self.known[key] = answer

    def take_over(self, other: "Answers") -> None:
        """Copy the answers that only the folder of `other` has. Both folders must be open.

        Raises:
            SparsekvError: the file cannot be written, for example because the disk is full.
        """
        assert other._file is not None
        other._file.seek(0)
        lines = other._file.read().splitlines(keepends=True)
        self._append(b"".join(line for line in lines if json.loads(line)["key"] not in self.known))
        self.known = other.known | self.known

    def _append(self, lines: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise SparsekvError(
                f"cannot write {self._path}: {error.strerror or error}; free space, and run the same command again"
            ) from None

    def _load(self, file: IO[bytes]) -> None:
        """Read all answers. An incomplete last line of a killed run is removed from the file.

        Raises SparsekvError for any other line that is not an answer.
        """
        file.seek(0)
        data = file.read()
        whole = data.rfind(b"\n") + 1
        lines, rest = data[:whole].splitlines(), data[whole:]
        # A last line that does not begin like an answer is not one of a killed run, and is not removed.
        for number, line in enumerate([*lines, *([] if BEGINNING.startswith(rest[: len(BEGINNING)]) else [rest])], 1):
            try:
                record = json.loads(line)
                self.known[record["key"]] = _answer_in(record)
            except (ValueError, KeyError, TypeError, RecursionError):
                raise SparsekvError(
                    f"line {number} of {self._path} is damaged; remove the line, and its question is asked again"
                ) from None
        file.truncate(whole)  # only after every line was valid, so that another program's file is not changed


def _answer_in(record: dict[str, Any]) -> ScoredAnswer:
    """Return the answer in a line of the file.

    Raises KeyError for a missing field, and ValueError for a text or number that is none, such as NaN.
    """
    answer = ScoredAnswer(**{name: record[name] for name in ScoredAnswer.__dataclass_fields__})
    numbers = [answer.seconds, *(one for one in (answer.loss, answer.kv_fraction) if one is not None)]
    if not isinstance(answer.text, str) or not all(type(one) in (int, float) and isfinite(one) for one in numbers):
        raise ValueError("no answer")
    return answer


@dataclass(frozen=True)
class Variant:
    """Configuration that answers questions: the context's prefill, and the decoding method with variant and budget.

    `budget` is None for dense attention.
    """

    prefill: str
    method: str
    variant: str = ""
    budget: Budget | None = None

    def record(self) -> dict[str, Any]:
        """Return the variant's fields of a table row. A budget is an int (number of tokens) or a float (share)."""
        return {**asdict(self), "budget": None if self.budget is None else self.budget.value}


@dataclass(frozen=True)
class Result:
    """The answer to one question with one variant; `tokens` is the number of tokens of the indexed context."""

    context: Context
    question: Question
    way: Variant
    given: ScoredAnswer
    tokens: int

    @property
    def turn(self) -> int:
        """Number of the question's turn in its conversation, from 1; 1 for a question that is not a turn."""
        return 1 + len(self.question.earlier)

    @property
    def score(self) -> float:
        """Score of the answer by the question's metric; for a continuation, the mean loss per token in nats."""
        if self.given.loss is not None:
            return self.given.loss
        return METRICS[self.question.metric].score(self.given.text, self.question)

    def record(self) -> dict[str, Any]:
        """Return the result as a JSON object, with the score in the unit of its metric."""
        context, question, given, metric = self.context, self.question, self.given, METRICS[self.question.metric]
        return {
            "task": context.task,
            "context": context.name,
            "length": context.length,
            "tokens": self.tokens,
            "question": question.text,
            "turn": self.turn,
            "expected": question.answers,
            "depth": question.depth,
            **self.way.record(),
            "answer": None if metric.continuation else given.text,
            "metric": question.metric,
            "unit": metric.unit,
            "score": metric.summary(self.score),
            "loss": given.loss,
            "kv_fraction": given.kv_fraction,
            "seconds": given.seconds,
        }


@dataclass(frozen=True)
class Score:
    """Score of one variant on one task at one length, in the metric's unit, with the bounds of its 95% interval.

    `turn` is the number of the turn, from 1, whose questions are scored; None for the questions of all turns, and for
    questions that are not turns.

    `difference` is the score minus that of the baseline, which is dense attention with the first prefill; None for the
    baseline itself. Bounds are None if the `Interval` has none. `same_as_dense` is the percentage of answers with the
    same text as the baseline's answers; None for the baseline itself and for continuations.

    `length` is the requested number of tokens; None for published contexts. `tokens` is the mean number of tokens of
    the contexts. A context may be shorter than `length`, because it has only whole sentences, words or items.
    `kv_fraction` and `seconds` are means over the answers. An unknown KV fraction is left out.
    """

    task: str
    length: int | None
    turn: int | None
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
    score_low: float | None
    score_high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    same_as_dense: float | None
    kv_fraction: float | None
    seconds: float


@dataclass(frozen=True)
class Cell:
    """Mean score of one variant on the questions of one task, length and depth.

    `depth` is the position of the needle or answer, as a share of the context. It is the depth at which the task was to
    put the needle, if the task's needles have at most MOST_DEPTHS such depths. Otherwise it is the centre of a bin of
    width 0.1.
    """

    task: str
    length: int
    depth: float
    prefill: str
    method: str
    variant: str
    budget: float | int | None
    questions: int
    score: float


MOST_DEPTHS = 25
"""Maximum number of different depths of a task's needles that are not put into bins."""
Asked = tuple[Question, int]
"""A question of a context, and its number, from 1, among equal questions of this context."""


def rows(results: Iterable[Result], seed: int = 0) -> list[Score]:
    """Compute the rows of the table: one for each variant in each group of the same task, length and metric.

    If a group's questions are turns, rows for each turn follow. Only questions that all variants of a group have
    answered are counted. Rows are in the order in which the variants first occur.
    """
    groups: dict[tuple[str, int | None, str], list[Result]] = {}
    for result in results:
        key = (result.context.task, result.context.length, result.question.metric)
        groups.setdefault(key, []).append(result)
    return [row for group in groups.values() for turn in _turns(group) for row in _group(group, turn, seed)]


def expecting_dense(results: Sequence[Result]) -> list[Result]:
    """Set the expected answer of results whose metric is `of_dense` to dense attention's answer to the question.

    With several prefills, the expected answer is that of dense attention with the first prefill.
    """
    dense: dict[tuple[Context, Question], str] = {}
    for result in results:
        if result.way.budget is None:
            dense.setdefault((result.context, result.question), result.given.text)
    return [
        replace(result, question=replace(result.question, answers=(dense[result.context, result.question],)))
        if METRICS[result.question.metric].of_dense
        else result
        for result in results
    ]


def _turns(results: list[Result]) -> list[int | None]:
    """Return the values of `turn` in the table: None for all questions, and each turn's number if there are turns."""
    turns = sorted({result.turn for result in results})
    return [None, *(turns if len(turns) > 1 else ())]


def _group(group: list[Result], turn: int | None, seed: int) -> list[Score]:
    results = [result for result in group if turn in (None, result.turn)]
    task, length, metric = results[0].context.task, results[0].context.length, results[0].question.metric
    ways: dict[Variant, dict[Context, dict[Asked, Result]]] = {}
    repeats = Counter[tuple[Variant, Context, Question]]()
    for result in results:
        repeats[one := (result.way, result.context, result.question)] += 1
        ways.setdefault(result.way, {}).setdefault(result.context, {})[result.question, repeats[one]] = result
    shared = _shared(list(ways.values()))
    base = next((way for way in ways if way.budget is None), None)
    told = METRICS[metric]
    found = []
    for way, answered in ways.items():
        kept = [[answered[context][question] for question in asked] for context, asked in shared.items()]
        scores = [[result.score for result in one] for one in kept]
        # Dense attention's answer to a question scores 100% by definition if it is the expected one.
        limits = None if told.continuation or (told.of_dense and way == base) else (0.0, 1.0)
        score = interval(scores, told.summary, limits=limits, seed=seed)
        difference = same = None
        if base is not None and way != base:
            dense = [[ways[base][one][question] for question in asked] for one, asked in shared.items()]
            others = [[result.score for result in one] for one in dense]
            difference = paired_difference(scores, others, told.summary, limits=limits, seed=seed)
            same = None if told.continuation else _same_texts(kept, dense)
        flat = [result.given for one in kept for result in one]
        found.append(
            Score(
                task=task,
                length=length,
                turn=turn,
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
                same_as_dense=same,
                kv_fraction=_read([given.kv_fraction for given in flat]),
                seconds=_mean([given.seconds for given in flat]),
            )
        )
    return found


def _same_texts(results: list[list[Result]], others: list[list[Result]]) -> float:
    """Return the percentage of questions whose answers in `results` and `others` have the same text."""
    pairs = zip(chain.from_iterable(results), chain.from_iterable(others), strict=True)
    return 100 * _mean([one.given.text == other.given.text for one, other in pairs])


def _shared(by_variant: list[dict[Context, dict[Asked, Result]]]) -> dict[Context, list[Asked]]:
    """Return the questions of each context that were answered with every variant."""
    shared = {}
    for context, asked in by_variant[0].items():
        kept = [question for question in asked if all(question in way.get(context, {}) for way in by_variant)]
        if kept:
            shared[context] = kept
    return shared


def cells(results: Iterable[Result]) -> list[Cell]:
    """Compute the mean score of each variant on the questions of each task, length and depth, in the metric's unit.

    Questions without a depth, and questions about published contexts, which have no length, are left out.
    """
    found: dict[tuple[Any, ...], list[float]] = {}
    kept = [one for one in results if one.question.depth is not None and one.context.length is not None]
    placed: dict[str, set[float | None]] = {}
    for result in kept:
        placed.setdefault(result.context.task, set()).add(result.question.placed)
    # Needles lie between sentences, so those of one wanted depth may be in two bins.
    wanted = {task for task, depths in placed.items() if None not in depths and len(depths) <= MOST_DEPTHS}
    for result in kept:
        question = result.question
        depth = question.placed if result.context.task in wanted else _tenth(question.depth or 0.0)
        key = (result.context.task, result.context.length, depth, result.way, METRICS[result.question.metric])
        found.setdefault(key, []).append(result.score)
    return [
        Cell(task, length, depth, **way.record(), questions=len(scores), score=metric.summary(_mean(scores)))
        for (task, length, depth, way, metric), scores in found.items()
    ]


def _tenth(depth: float) -> float:
    """Return the centre of a depth's bin of width 0.1."""
    return min(int(10 * depth), 9) / 10 + 0.05


def _read(shares: Sequence[float | None]) -> float | None:
    """Return the mean of the known KV fractions of answers; None if none is known."""
    of_steps = [share for share in shares if share is not None]
    return _mean(of_steps) if of_steps else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
