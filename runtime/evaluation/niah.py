"""Needles in a haystack, in RULER's four forms (arXiv 2404.06654): single, multi-key, multi-value and multi-query.

A fifth form, niah-facts, has dissimilar keys, for models that cannot distinguish RULER's.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from sparsekv.runtime.evaluation.haystack import depth_of, fill, insert, rotated, sentences
from sparsekv.runtime.evaluation.tasks import Context, Question, Request, Task, tasks
from sparsekv.runtime.evaluation.words import pairs, things


@dataclass(frozen=True)
class Wording:
    """The sentences in which needles are hidden and asked for, and the function that draws different keys."""

    introduction: str
    needle: str
    ask_one: str
    one_is: str
    ask_all: str
    all_are: str
    keys: Callable[[int, random.Random], list[str]]


MAGIC = Wording(
    introduction="Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n",
    needle="One of the special magic numbers for {key} is: {value}.",
    ask_one="What is the special magic number for {query} mentioned in the provided text?",
    one_is="The special magic number for {query} mentioned in the provided text is",
    ask_all="What are all the special magic numbers for {query} mentioned in the provided text?",
    all_are="The special magic numbers for {query} mentioned in the provided text are",
    keys=pairs,
)
ONE_MAGIC = replace(
    MAGIC,
    introduction="A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n",
)
THINGS = replace(
    MAGIC,
    needle="The {key} is {value}.",
    ask_one="What is the {query} mentioned in the provided text?",
    one_is="The {query} is",
    keys=things,
)

DIGITS = 7
TOKENS_A_VALUE = 12  # seven digits, a quote and a space in any tokenizer; RULER's 128 let a model ramble on


@dataclass(frozen=True)
class Needles(Task):
    """A needle task with `values` per key, whose questions ask for `asked` keys each. A context has at least `keys`
    keys, and one for each question; with `alone` it has one needle and one question."""

    name: str
    keys: int
    values: int
    asked: int
    wording: Wording = MAGIC
    alone: bool = False

    def make(self, request: Request) -> list[Context]:
        units = sentences(request.text)
        return [self._context(request, number, units) for number in range(request.contexts)]

    def _context(self, request: Request, number: int, units: list[str]) -> Context:
        drawn = random.Random(f"{request.seed} {self.name} {request.length} {number}")
        questions = 1 if self.alone else request.asked()
        keys = self.wording.keys(max(self.keys, questions), drawn)
        hidden = {key: _numbers(self.values, drawn) for key in keys}
        needles = [self.wording.needle.format(key=key, value=value) for key in keys for value in hidden[key]]
        drawn.shuffle(needles)
        offset, of = (number, request.contexts) if self.alone else (0, len(needles))
        placed = [(request.depth(offset + n, of), needle) for n, needle in enumerate(needles)]
        text = _hide(rotated(units, drawn), placed, request, self.wording.introduction, self.name)
        asked = [[key] for key in keys] if self.asked == 1 else [drawn.sample(keys, self.asked) for _ in keys]
        return Context(
            task=self.name,
            name=f"{request.length} tokens, {number}",
            text=text,
            questions=tuple(self._question(text, some, hidden) for some in asked[:questions]),
            length=request.length,
        )

    def _question(self, text: str, keys: list[str], hidden: dict[str, list[str]]) -> Question:
        answers = tuple(value for key in keys for value in hidden[key])
        query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
        words = self.wording
        ask, begin = (words.ask_one, words.one_is) if len(answers) == 1 else (words.ask_all, words.all_are)
        return Question(
            text=ask.format(query=query),
            prefix=begin.format(query=query),
            answers=answers,
            metric="match-all",
            max_new_tokens=TOKENS_A_VALUE * len(answers),
            depth=depth_of(text, words.needle.format(key=keys[0], value=answers[0])) if len(answers) == 1 else None,
        )


def _numbers(number: int, drawn: random.Random) -> list[str]:
    return [str(value) for value in drawn.sample(range(10 ** (DIGITS - 1), 10**DIGITS), number)]


def _hide(units: list[str], needles: list[tuple[float, str]], request: Request, introduction: str, name: str) -> str:
    def render(some: list[str]) -> str:
        return introduction + " ".join(insert(some, needles))

    return render(fill(units, render, request.count, request.length, name))


tasks.add("niah-facts", Needles("niah-facts", 4, 1, 1, THINGS))
tasks.add("niah-single", Needles("niah-single", 1, 1, 1, ONE_MAGIC, True))
tasks.add("niah-multikey", Needles("niah-multikey", 4, 1, 1))
tasks.add("niah-multivalue", Needles("niah-multivalue", 1, 4, 1))
tasks.add("niah-multiquery", Needles("niah-multiquery", 4, 1, 4))
