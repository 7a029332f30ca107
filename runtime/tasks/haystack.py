"""Generate RULER's tasks (arXiv 2404.06654) and two similar ones, `niah-facts` and `scbench-vt`.

The tasks are needles in haystacks, aggregation and variable tracking.
"""

import random
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar
from uuid import UUID

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.tasks.interface import Context, CountTokens, DrawnTask, Question, Request, tasks

ADJECTIVES = re.findall(
    r"\w+",
    """
    able ancient basic bitter brave brief bright broad calm careful cheap clean clear clever cold common
    complex cool curious daily dark deep direct double dry eager early easy empty equal exact fair famous
    fancy fast final fine firm flat formal free fresh full funny gentle giant glad golden grand great green
    happy hard heavy hollow honest huge humble ideal jolly keen kind large lazy light little lonely long loud
    lucky magic major merry mild modern modest narrow neat noble normal odd open orange pale plain polite
    proud pure quick quiet random rapid rare ready rich ripe rough round royal rural safe secret shallow sharp
    shiny short silent silly simple slow small smart smooth soft solid special steady steep strange strict
    strong sudden sweet swift tall tame tender thin tidy tiny tough urban useful vast vivid warm weak wet
    white wide wild wise young
    """,
)

NOUNS = re.findall(
    r"\w+",
    """
    actor anchor animal apple arrow artist author badge baker balcony banana basket beach bell bench bird
    blanket boat book bottle branch bread bridge brush bucket butter button cabin cable camera candle canvas
    carpet castle cattle chair cherry circle circus cloud coat coffee copper cotton cousin cradle crystal
    curtain dance desert diamond doctor dragon driver eagle engine falcon farmer feather fence finger flame
    flower forest fountain garden gate glass glove guitar hammer harbor helmet honey horse hotel island jacket
    jewel judge jungle kettle kitchen ladder lake lamp lantern lemon letter library lion lizard magnet marble
    market meadow melon mirror monkey moon mountain museum needle nest novel ocean olive onion orchard oven
    owl oyster painter palace paper parade parrot pencil pepper piano picture pillow pilot planet pocket pony
    potato prince puzzle rabbit radio rain ribbon river road robot rocket saddle sailor salmon school shadow
    sheep shell shirt singer sister smoke soldier spider spoon spring statue stone street student summer table
    tailor teacher temple ticket tiger tower train tree tunnel turtle umbrella uncle valley vessel village
    violin wagon wallet whale wheel window winter wolf writer yard zebra
    """,
)

NUMBERS_OF = (
    "access code of the vault",
    "account number of the museum",
    "alarm code of the warehouse",
    "catalogue number of the violin",
    "combination of the bicycle lock",
    "contract number of the gardener",
    "customer number of the library",
    "employee number of the cook",
    "file number of the lawyer",
    "flight number to Vienna",
    "invoice number of the plumber",
    "licence plate of the ambulance",
    "locker number of the swimmer",
    "membership number of the chess club",
    "model number of the dishwasher",
    "order number of the wedding cake",
    "parcel number of the piano",
    "passport number of the pilot",
    "patent number of the umbrella",
    "phone number of the bakery",
    "policy number of the farmer",
    "population of the island",
    "prisoner number of the poet",
    "room key of the ambassador",
    "serial number of the telescope",
    "student number of the drummer",
    "tax number of the circus",
    "ticket number of the dentist",
    "tracking number of the carpet",
    "weight of the comet",
)


DIGITS = 7
"""Number of digits of a needle's value, if the value is a number."""


def things(number: int, random_numbers: random.Random) -> list[str]:
    """Draw `number` different names of things from `NUMBERS_OF`. Raises UsageError if the list has fewer."""
    if number > len(NUMBERS_OF):
        raise UsageError(
            f"--questions {number}: niah-facts has {len(NUMBERS_OF)} questions at most per context; give fewer"
        )
    return random_numbers.sample(NUMBERS_OF, number)


def pairs(number: int, random_numbers: random.Random) -> list[str]:
    """Draw `number` different keys of an adjective and a noun, as in RULER."""
    chosen = random_numbers.sample(range(len(ADJECTIVES) * len(NOUNS)), number)
    return [f"{ADJECTIVES[one // len(NOUNS)]}-{NOUNS[one % len(NOUNS)]}" for one in chosen]


def numbers(number: int, random_numbers: random.Random) -> list[str]:
    """Draw `number` different numbers of DIGITS digits."""
    return [str(value) for value in random_numbers.sample(range(10 ** (DIGITS - 1), 10**DIGITS), number)]


def uuids(number: int, random_numbers: random.Random) -> list[str]:
    """Draw `number` random UUIDs."""
    return [str(UUID(int=random_numbers.getrandbits(128), version=4)) for _ in range(number)]


def coined(number: int, letters: int, alphabet: str, random_numbers: random.Random) -> list[str]:
    """Generate `number` different words of random letters."""
    words: dict[str, None] = {}
    while len(words) < number:
        words["".join(random_numbers.choices(alphabet, k=letters))] = None
    return list(words)


LONGEST_SENTENCE = 400  # characters; tables and code have no full stops to split at
LEAST_SUGGESTED = 256
"""Tokens of the shortest context that an error message suggests. Sinks and tail take about half of it."""


@lru_cache(1)  # all contexts of a task need the sentences of the same text
def sentences(text: str) -> list[str]:
    """Split a text into sentences, with white space collapsed.

    Sentences over LONGEST_SENTENCE characters are cut, between words if possible.
    """
    flat = " ".join(text.split())
    found = []
    for sentence in re.split(r"(?<=[.!?])\s", flat):
        while len(sentence) > LONGEST_SENTENCE:
            cut = sentence.rfind(" ", 1, LONGEST_SENTENCE)
            cut = LONGEST_SENTENCE if cut < 0 else cut
            found.append(sentence[:cut])
            sentence = sentence[cut:].lstrip()
        if sentence:
            found.append(sentence)
    return found


def rotated(units: list[str], random_numbers: random.Random) -> list[str]:
    """Return the sentences in the same cyclic order from a random start, so that contexts differ."""
    start = random_numbers.randrange(len(units)) if units else 0
    return units[start:] + units[:start]


def largest(fits: Callable[[int], bool], upper: int) -> int:
    """Return the largest number from 0 to `upper` for which `fits` is True, by bisection; -1 if it never is.

    `fits` must be True up to some number and False above it.
    """
    low, high = -1, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def fill(units: list[str], render: Callable[[list[str]], str], count: CountTokens, length: int, task: str) -> list[str]:
    """Return the longest prefix of the units that `render` turns into a text of at most `length` tokens.

    Args:
        units: parts of the text, such as sentences.
        task: the task's name for errors.

    Raises:
        UsageError: the text is too long even without units, or all units fill less than three quarters of the length.
    """
    # Sizes are doubled from a small start. Bisection from the whole text would tokenise a book several times, which
    # takes longer than the model's answers.
    upper = min(len(units), 4 * length)
    size = min(upper, 16)
    while size < upper and count(render(units[:size])) <= length:
        size = min(upper, 2 * size)
    used = largest(lambda number: count(render(units[:number])) <= length, size)
    if used < 0:
        raise UsageError(f"--length {length} is too small for {task}; give more tokens")
    if used == len(units):
        refuse_short(count(render(units)), length, task)
    return units[:used]


def refuse_short(tokens: int, length: int, task: str) -> None:
    """Raise UsageError if the context made of the whole text has less than three quarters of the requested length."""
    if tokens < 0.75 * length:
        shorter = f"--length {tokens}, or " if tokens >= LEAST_SUGGESTED else ""
        raise UsageError(
            f"the text is too short for --task {task}: --length is {length} tokens, and the context made of "
            f"the whole text has {tokens}; give {shorter}a longer text"
        )


def insert(units: list[str], needles: list[tuple[float, str]]) -> list[str]:
    """Insert needles between the units, each at its depth: the share of the units' characters that precede it."""
    total, before, placed = sum(map(len, units)), 0, []
    waiting = sorted(needles)
    for unit in units:
        # A needle goes to the nearer end of the sentence at its depth.
        while waiting and waiting[0][0] * total <= before + len(unit) / 2:
            placed.append(waiting.pop(0)[1])
        placed.append(unit)
        before += len(unit)
    return placed + [needle for _, needle in waiting]


def depth_of(text: str, part: str) -> float:
    """Return the position of a part's first character in a text, as a fraction of the text's length."""
    return text.index(part) / len(text)


@dataclass(frozen=True)
class Wording:
    """Templates of a task's introduction, needles, questions and answers, and the function that draws its keys.

    `ask_one` is the question for a single value, and `one_is` the beginning of the answer. `ask_all` and `all_are` are
    the question for several values and the beginning of the answer.
    """

    introduction: str
    needle: str
    ask_one: str
    one_is: str
    ask_all: str
    all_are: str
    keys: Callable[[int, random.Random], list[str]]


def magic(value: str, keys: Callable[[int, random.Random], list[str]]) -> Wording:
    """Return RULER's templates for values of a kind, such as `number`."""
    return Wording(
        introduction=f"Some special magic {value}s are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {value}s afterwards.\n",
        needle=f"One of the special magic {value}s for {{key}} is: {{value}}.",
        ask_one=f"What is the special magic {value} for {{query}} mentioned in the provided text?",
        one_is=f"The special magic {value} for {{query}} mentioned in the provided text is",
        ask_all=f"What are all the special magic {value}s for {{query}} mentioned in the provided text?",
        all_are=f"The special magic {value}s for {{query}} mentioned in the provided text are",
        keys=keys,
    )


MAGIC, UUIDS = magic("number", pairs), magic("uuid", uuids)
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

TOKENS_A_VALUE = 12  # enough for seven digits, a quote and a space in any tokenizer; RULER allows 128
TOKENS_A_UUID = 48  # enough for 32 hexadecimal digits and four dashes, even if each is a token


def question_of(
    words: Wording,
    text: str,
    keys: list[str],
    hidden: dict[str, list[str]],
    tokens: int,
    placed: Mapping[str, float],
) -> Question:
    """Make the question that asks for the values of some keys.

    Args:
        text: the context, in which the needles are.
        hidden: the values of each key.
        tokens: maximum number of answer tokens for each value.
        placed: the depths at which needles were to be hidden, by needle.
    """
    answers = tuple(value for key in keys for value in hidden[key])
    needle = words.needle.format(key=keys[0], value=answers[0]) if len(answers) == 1 else None
    query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    ask, begin = (words.ask_one, words.one_is) if len(answers) == 1 else (words.ask_all, words.all_are)
    return Question(
        text=ask.format(query=query),
        prefix=begin.format(query=query),
        answers=answers,
        metric="match-all",
        max_new_tokens=tokens * len(answers),
        depth=None if needle is None else depth_of(text, needle),
        placed=None if needle is None else placed[needle],
    )


@dataclass(frozen=True)
class Needles(DrawnTask):
    """A needle task: sentences that give a key a value are hidden in a text, and questions ask for the values of keys.

    Attributes:
        keys: minimum number of keys of a context. A context has at least one key for each question.
        values: number of values of a key.
        asked: number of keys that a question asks for.
        alone: whether a context has only one needle and one question.
    """

    options = ("--depth",)
    alone: ClassVar[bool] = False

    name: str
    keys: int
    values: int
    asked: int
    wording: Wording = MAGIC

    def draw(self, request: Request, number: int) -> Context:
        drawn = random.Random(f"{request.seed} {self.name} {request.length} {number}")
        questions = 1 if self.alone else request.asked()
        keys = self.wording.keys(max(self.keys, questions), drawn)
        hidden = {key: numbers(self.values, drawn) for key in keys}
        needles = [self.wording.needle.format(key=key, value=value) for key in keys for value in hidden[key]]
        drawn.shuffle(needles)
        offset, of, more = (number, request.contexts, "--contexts") if self.alone else (0, len(needles), "--questions")
        placed = [(request.depth(offset + n, of, more), needle) for n, needle in enumerate(needles)]
        text = hide(rotated(sentences(request.text), drawn), placed, request, self.wording.introduction, self.name)
        asked = [[key] for key in keys] if self.asked == 1 else [drawn.sample(keys, self.asked) for _ in keys]
        depths = {needle: depth for depth, needle in placed}
        return Context(
            task=self.name,
            name=f"{request.length} tokens, {number}",
            text=text,
            questions=tuple(
                question_of(self.wording, text, one, hidden, TOKENS_A_VALUE, depths) for one in asked[:questions]
            ),
            length=request.length,
        )


def hide(units: list[str], needles: list[tuple[float, str]], request: Request, introduction: str, name: str) -> str:
    """Return the introduction and as many of the units as fit the request's length, with needles at their depths.

    Raises the errors of `fill`, which name the task `name`.
    """

    def render(some: list[str]) -> str:
        return introduction + " ".join(insert(some, needles))

    return render(fill(units, render, request.count, request.length, name))


class LoneNeedle(Needles):
    """A needle task whose contexts have one needle and one question each."""

    unread = ("--questions", "--batch-size")
    alone = True


LEAST_NEEDLE = 8
"""Fewest tokens of a needle in any tokenizer."""


@dataclass(frozen=True)
class NeedlesAlone(DrawnTask):
    """A needle task without other text: each line of the context gives a value to a key, as in RULER's multi-key 2 and
    3. The questions ask for the values of evenly spread lines, or of the lines nearest to the request's depths.

    Attributes:
        values: draws the values of the keys.
        tokens: maximum number of answer tokens for a value.
    """

    options = ("--depth",)
    needs_text = False

    name: str
    wording: Wording
    values: Callable[[int, random.Random], list[str]]
    tokens: int

    def draw(self, request: Request, number: int) -> Context:
        drawn = random.Random(f"{request.seed} {self.name} {request.length} {number}")
        most = min(request.length // LEAST_NEEDLE, len(ADJECTIVES) * len(NOUNS))
        keys, values = self.wording.keys(most, drawn), self.values(most, drawn)
        lines = [self.wording.needle.format(key=key, value=value) for key, value in zip(keys, values, strict=True)]

        def render(some: list[str]) -> str:
            return self.wording.introduction + "\n".join(some)

        used = fill(lines, render, request.count, request.length, self.name)
        if len(used) < request.asked():
            raise UsageError(
                f"--length {request.length} is too small for {self.name}; give more tokens, or fewer --questions"
            )
        text, hidden = render(used), {key: [value] for key, value in zip(keys, values, strict=True)}
        depths = [request.depth(one, request.asked()) for one in range(request.asked())]
        places = nearest(depths, len(used))
        placed = {lines[place]: depth for place, depth in zip(places, depths, strict=True)}
        questions = tuple(question_of(self.wording, text, [keys[one]], hidden, self.tokens, placed) for one in places)
        return Context(self.name, f"{request.length} tokens, {number}", text, questions, request.length)


def nearest(depths: list[float], lines: int) -> list[int]:
    """Return, for each depth from 0 to 1, the index of the nearest of `lines` lines that no earlier depth took."""
    left = list(range(lines))

    def take(depth: float) -> int:
        return left.pop(min(range(len(left)), key=lambda place: abs(left[place] + 0.5 - depth * lines)))

    return [take(depth) for depth in depths]


tasks.add("niah-facts", Needles("niah-facts", 4, 1, 1, THINGS))
tasks.add("niah-single", LoneNeedle("niah-single", 1, 1, 1, ONE_MAGIC))
tasks.add("niah-multikey", Needles("niah-multikey", 4, 1, 1))
tasks.add("niah-multikey-2", NeedlesAlone("niah-multikey-2", MAGIC, numbers, TOKENS_A_VALUE))
tasks.add("niah-multikey-3", NeedlesAlone("niah-multikey-3", UUIDS, uuids, TOKENS_A_UUID))
tasks.add("niah-multivalue", Needles("niah-multivalue", 1, 4, 1))
tasks.add("niah-multiquery", Needles("niah-multiquery", 4, 1, 4))

COMMON_INTRODUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
COMMON_ASK = "Question: What are the 10 most common words in the above list?"
COMMON_BEGIN = "Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
LONG = 4096  # tokens; from this length on, RULER repeats common words 30 times instead of 6 times

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


class CommonWords(DrawnTask):
    """Lists words, of which ten are common. A common word occurs 30 times, and any other word 3 times.

    If the requested length is below LONG tokens, a common word occurs 6 times, and any other word once.
    """

    unread = ("--questions", "--batch-size")

    def draw(self, request: Request, number: int) -> Context:
        known = sorted({*re.findall(r"\b[a-z]{4,10}\b", request.text), *ADJECTIVES, *NOUNS})
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
        if others == len(words) - COMMON:
            refuse_short(request.count(render(others)), request.length, "cwe")
        question = Question(COMMON_ASK, tuple(words[:COMMON]), "match-all", 120, COMMON_BEGIN)
        return Context("cwe", f"{request.length} tokens, {number}", render(others), (question,), request.length)


class FrequentWords(DrawnTask):
    """Lists coded words with frequencies by Zipf's law. The most frequent word is dots, which a model must ignore."""

    unread = ("--questions", "--batch-size")
    needs_text = False

    def draw(self, request: Request, number: int) -> Context:
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

INTRODUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
ASK = "Question: Find all variables that are assigned the value {value} in the text above."
BEGIN = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are:"
)
HOPS = 4
MAX_NEW_TOKENS = 30


@dataclass(frozen=True)
class VariableTracking(DrawnTask):
    """Hides chains of variable assignments, of four hops. Each question asks for the variables of another chain.

    The assignments of a chain are in order, with text and other chains between them.

    Attributes:
        chains: minimum number of chains of a context. A context has at least one chain for each question.
    """

    name: str
    chains: int

    def draw(self, request: Request, number: int) -> Context:
        drawn = random.Random(f"{request.seed} {self.name} {request.length} {number}")
        chains = max(self.chains, request.asked())
        names = coined((HOPS + 1) * chains, 5, string.ascii_uppercase, drawn)
        values = drawn.sample(range(10_000, 100_000), chains)
        needles = []
        for chain, value in enumerate(values):
            names_here = names[chain * (HOPS + 1) : (chain + 1) * (HOPS + 1)]
            sources = [str(value), *(f"VAR {name}" for name in names_here)]
            depths = sorted(drawn.random() for _ in names_here)
            needles += [
                (depth, f"VAR {name} = {source}.")
                for depth, name, source in zip(depths, names_here, sources, strict=False)
            ]
        text = hide(rotated(sentences(request.text), drawn), needles, request, INTRODUCTION, self.name)
        questions = [
            Question(
                text=ASK.format(value=value),
                prefix=BEGIN.format(value=value, count=HOPS + 1),
                answers=tuple(names[chain * (HOPS + 1) : (chain + 1) * (HOPS + 1)]),
                metric="match-all",
                max_new_tokens=MAX_NEW_TOKENS,
            )
            for chain, value in enumerate(values[: request.asked()])
        ]
        return Context(self.name, f"{request.length} tokens, {number}", text, tuple(questions), request.length)


tasks.add("vt", VariableTracking("vt", 1))
tasks.add("scbench-vt", VariableTracking("scbench-vt", 10))
