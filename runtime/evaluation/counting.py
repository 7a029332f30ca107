"""RULER's aggregation tasks: the ten common words of a numbered list, the three most frequent words of a coded text."""

import random
import re
import string

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.evaluation.haystack import largest
from sparsekv.runtime.evaluation.tasks import Context, Question, Request, Task, tasks
from sparsekv.runtime.evaluation.words import ADJECTIVES, NOUNS, coined

COMMON_INTRODUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
COMMON_ASK = "Question: What are the 10 most common words in the above list?"
COMMON_BEGIN = "Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
LONG = 4096  # tokens; from this length on RULER repeats the common words 30 times instead of 6

FREQUENT_INTRODUCTION = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
FREQUENT_ASK = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FREQUENT_BEGIN = "Answer: According to the coded text above, the three most frequently appeared words are:"
ALPHA = 2.0
ZETA = 1.6449340668482264  # zeta(ALPHA), which normalises the frequencies


class CommonWords(Task):
    """Words of the text and of a word list; ten of them occur ten times as often as the rest (short lists: six)."""

    def make(self, request: Request) -> list[Context]:
        own = re.findall(r"\b[a-z]{4,10}\b", request.text)
        known = sorted({*own, *ADJECTIVES, *NOUNS})
        return [self._context(request, number, known) for number in range(request.contexts)]

    def _context(self, request: Request, number: int, known: list[str]) -> Context:
        drawn = random.Random(f"{request.seed} cwe {request.length} {number}")
        words = drawn.sample(known, len(known))
        often, seldom = (30, 3) if request.length >= LONG else (6, 1)
        order = random.Random(drawn.random())
        state = order.getstate()

        def render(others: int) -> str:
            order.setstate(state)
            listed = words[:COMMON] * often + words[COMMON : COMMON + others] * seldom
            order.shuffle(listed)
            return COMMON_INTRODUCTION + " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))

        others = largest(lambda some: request.count(render(some)) <= request.length, len(words) - COMMON)
        if others < 1:
            raise UsageError(f"--length {request.length} is too small for cwe; give more tokens")
        question = Question(COMMON_ASK, tuple(words[:COMMON]), "match-all", 120, COMMON_BEGIN)
        return Context("cwe", f"{request.length} tokens, {number}", render(others), (question,), request.length)


class FrequentWords(Task):
    """Coded words with frequencies by Zipf's law; the most frequent one is dots, which are to be ignored."""

    def make(self, request: Request) -> list[Context]:
        return [self._context(request, number) for number in range(request.contexts)]

    def _context(self, request: Request, number: int) -> Context:
        drawn = random.Random(f"{request.seed} fwe {request.length} {number}")
        coded = ["...", *coined(max(4, request.length // 50), 6, string.ascii_lowercase, drawn)]
        order = random.Random(drawn.random())
        state = order.getstate()

        def render(size: int) -> str:
            order.setstate(state)
            listed = [word for rank, word in enumerate(coded, 1) for _ in range(int(size * rank**-ALPHA / ZETA))]
            order.shuffle(listed)
            return FREQUENT_INTRODUCTION + " ".join(listed)

        size = largest(lambda some: request.count(render(some)) <= request.length, request.length)
        # With fewer words the fourth and fifth ranks can be equally frequent, so that the answer is ambiguous.
        if size < 100:
            raise UsageError(f"--length {request.length} is too small for fwe; give more tokens")
        question = Question(FREQUENT_ASK, tuple(coded[1:4]), "match-all", 50, FREQUENT_BEGIN)
        return Context("fwe", f"{request.length} tokens, {number}", render(size), (question,), request.length)


tasks.add("cwe", CommonWords())
tasks.add("fwe", FrequentWords())
