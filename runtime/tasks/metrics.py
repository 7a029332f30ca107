"""Metrics of answers: scores from 0 to 1 by benchmarks' published rules, similarity to dense attention, perplexity."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import chain, takewhile

from rapidfuzz import fuzz

from sparsekv.runtime.tasks.interface import Question

ScoreFunction = Callable[[str, Question], float]


@dataclass(frozen=True)
class Metric:
    """A score of one answer. Reports apply `summary` to the mean of the scores and show the result in `unit`.

    With `continuation` no answer is generated. The expected text is scored by its mean negative log-likelihood per
    token, in nats. With `every`, a right answer has all expected strings; otherwise, any one of them is a right answer.
    With `of_dense`, the expected answer is that of dense attention, and the task itself has none.
    """

    score: ScoreFunction
    summary: Callable[[float], float] = lambda mean: 100 * mean
    unit: str = "%"
    continuation: bool = False
    every: bool = False
    of_dense: bool = False


def match_all(answer: str, question: Question) -> float:
    """Compute RULER's `string_match_all`: the share of expected strings that the answer contains, ignoring case."""
    return sum(expected.lower() in answer.lower() for expected in question.answers) / len(question.answers)


def match_part(answer: str, question: Question) -> float:
    """Compute RULER's `string_match_part`: 1 if the answer contains any of the expected strings, ignoring case."""
    return float(any(expected.lower() in answer.lower() for expected in question.answers))


def normalise(text: str) -> str:
    """Normalise as SQuAD does: lower case, no punctuation, no articles, single spaces."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def f1(answer: str, question: Question) -> float:
    """Compute SQuAD's and LongBench's F1 over words: harmonic mean of precision and recall.

    Returns the highest score among the expected answers.
    """
    return max(_f1(normalise(answer).split(), normalise(expected).split()) for expected in question.answers)


def _f1(answer: list[str], expected: list[str]) -> float:
    shared = sum((Counter(answer) & Counter(expected)).values())
    return 2 * shared / (len(answer) + len(expected)) if shared else 0.0


def rouge_l(answer: str, question: Question) -> float:
    """Compute LongBench's ROUGE-L as the package `rouge` 1.0.1 does. Return the highest score of an expected answer.

    Sentences end with a full stop. Common words are the words of the longest common subsequence of any sentence of the
    answer and any sentence of the expected answer. The score is the harmonic mean of two shares: of the answer's
    different words, and of the expected answer's different words, that are common words.
    """
    return max(_rouge_l(answer, expected) for expected in question.answers)


@lru_cache(1024)  # the table asks for a score several times, and two summaries take some 0.1 s
def _rouge_l(answer: str, expected: str) -> float:
    said, wanted = _sentences(answer), _sentences(expected)
    common = {word for one in wanted for other in said for word in _common_subsequence(one, other)}
    both = len({*chain.from_iterable(said)}) + len({*chain.from_iterable(wanted)})
    return 2 * len(common) / both if said and wanted else 0.0


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence. As in the package, a sentence of white space has one word, the empty one."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_subsequence(words: list[str], others: list[str]) -> list[str]:
    """Return the longest common subsequence of two lists. Among equally long ones, it is the one of package `rouge`."""
    lengths = [[0] * (len(others) + 1)]
    for word in words:
        above, row = lengths[-1], [0]
        for place, other in enumerate(others):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[place]))
        lengths.append(row)
    found, first, second = list[str](), len(words), len(others)
    while first and second:
        if words[first - 1] == others[second - 1]:
            first, second = first - 1, second - 1
            found.append(words[first])
        elif lengths[first - 1][second] > lengths[first][second - 1]:
            first -= 1
        else:
            second -= 1
    return found


def classification(answer: str, question: Question) -> float:
    """Compute LongBench's classification score of the answer's first line.

    The score is 1 / the number of labels in the line if the expected label is one of these labels, else 0. A label that
    is only a part of the expected label does not count. Returns the highest score among the expected labels.
    """
    line = first_line(answer)
    return max(_class(line, expected, question.classes) for expected in question.answers)


def _class(line: str, expected: str, classes: tuple[str, ...]) -> float:
    named = [label for label in classes if label in line and (label == expected or label not in expected)]
    return 1 / len(named) if expected in named else 0.0


def retrieval(answer: str, question: Question) -> float:
    """Compute LongBench's retrieval score: the share of the answer's numbers that are the right paragraph's number."""
    numbers = [number for expected in question.answers for number in re.findall(r"\d+", expected)[:1]]
    return max((_share_of_numbers(answer, number) for number in numbers), default=0.0)


def count(answer: str, question: Question) -> float:
    """Compute LongBench's count score: the share of numbers in the answer that equal the expected number."""
    return max(_share_of_numbers(answer, expected) for expected in question.answers)


def _share_of_numbers(answer: str, expected: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(expected) / len(numbers) if numbers else 0.0


def code_similarity(answer: str, question: Question) -> float:
    """Compute LongBench's code score: the edit similarity of one line of the answer to the most similar expected line.

    The line is the first one without a backtick, # or //, which are signs of Markdown and of comments. The similarity
    is rounded to whole percent, as in LongBench.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")
    return max(round(fuzz.ratio(line, expected)) / 100 for expected in question.answers)


def choice(answer: str, question: Question) -> float:
    """Compute LongBench-v2's score: 1 if the letter after "The correct answer is" is right, else 0."""
    text = answer.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(found is not None and found.group(1) in question.answers)


def substring(answer: str, question: Question) -> float:
    """Compute SCBench's score of retrieved strings: 1 if the answer contains an expected string, with its case."""
    return float(any(expected in answer for expected in question.answers))


def number(answer: str, question: Question) -> float:
    """Compute SCBench's score of numbers: 1 if the answer's first number is an expected one.

    The first number's decimals count only if the expected number has decimals.
    """
    found = re.search(r"\d+\.\d+|\d+", answer)
    return float(found is not None and any(_is_number(found.group(), expected) for expected in question.answers))


def _is_number(found: str, expected: str) -> bool:
    # As decimals, because a float has no more than 17 digits, and an answer's number can have hundreds.
    return Decimal(found if "." in expected else found.partition(".")[0]) == Decimal(expected)


def has_number(answer: str, question: Question) -> float:
    """Compute 1 if an expected number is among the answer's whole numbers, not only part of another number, else 0."""
    return float(any(expected in re.findall(r"\d+", answer) for expected in question.answers))


def option(answer: str, question: Question) -> float:
    """Compute SCBench's score of a multiple choice: 1 or 0. The expected answers are the option's text and its letter.

    The first of these rules that applies decides. If the answer begins with a letter A to D, the letter must be
    expected. An answer that is an expected answer scores 1. If the answer has a phrase such as "answer is", an expected
    answer must follow the phrase. Otherwise the first word of letters A to D must be expected.
    """
    text = answer.strip()
    if text[:1] in tuple("ABCD"):
        return float(text[0] in question.answers)
    if text in question.answers:
        return 1.0
    words = re.sub(r"[\n\"'.,?!{}]", " ", text)
    words = re.sub(" {2,}", " ", words)
    for phrase in ("answer is:", "answer:", "answer is", "option is"):
        if phrase in words:
            return float(words.split(phrase, 1)[1][1:].startswith(question.answers))
    letters = next((word for word in words.split() if word in "ABCD"), "")
    return float(letters in question.answers)


def same_start(answer: str, question: Question) -> float:
    """Compute the number of equal first words of answer and expected answer, as a share of the longer one's words."""
    words, expected = answer.split(), question.answers[0].split()
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words, expected, strict=False)))
    longer = max(len(words), len(expected))
    return same / longer if longer else 1.0


def first_line(text: str) -> str:
    """Return the text's first line after leading line breaks."""
    return text.lstrip("\n").split("\n")[0]


def _of_first_line(score: ScoreFunction) -> ScoreFunction:
    """Restrict a score to the answer's first line. After a few-shot prompt, a model's next lines are more examples."""
    return lambda answer, question: score(first_line(answer), question)


def _unscored(answer: str, question: Question) -> float:
    raise TypeError("a continuation is not generated")


METRICS = {
    "match-all": Metric(match_all, every=True),
    "match-part": Metric(match_part),
    "f1": Metric(f1),
    "f1-first-line": Metric(_of_first_line(f1)),
    "rouge-l": Metric(rouge_l),
    "rouge-l-first-line": Metric(_of_first_line(rouge_l)),
    "classification": Metric(classification),
    "retrieval": Metric(retrieval),
    "count": Metric(count),
    "code-similarity": Metric(code_similarity),
    "choice": Metric(choice),
    "substring": Metric(substring),
    "number": Metric(number),
    "has-number": Metric(has_number),
    "option": Metric(option),
    "same-start": Metric(same_start, of_dense=True),
    "perplexity": Metric(_unscored, math.exp, "", continuation=True),
}
