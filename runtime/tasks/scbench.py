"""Generate tasks like SCBench's (arXiv 2412.10319): several requests about one document, which is a list of items."""

import random
import re
import string
from abc import abstractmethod
from typing import ClassVar

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.tasks.haystack import ADJECTIVES, NOUNS, TOKENS_A_UUID, coined, fill, nearest, uuids
from sparsekv.runtime.tasks.interface import Context, DrawnTask, Question, Request, tasks

LEAST_ITEM = 4
"""Fewest tokens of an item in any tokenizer."""


class ItemList(DrawnTask):
    """A task whose document is a list of as many generated items as `--length` holds.

    Attributes:
        introduction, between, end: texts before, between and after the items.
    """

    name: ClassVar[str]
    introduction: ClassVar[str]
    between: ClassVar[str] = "\n"
    end: ClassVar[str] = ""
    needs_text = False

    def draw(self, request: Request, number: int) -> Context:
        drawn = random.Random(f"{request.seed} {self.name} {request.length} {number}")
        items = self.items(max(1, request.length // LEAST_ITEM), drawn)

        def render(some: list[str]) -> str:
            return self.introduction + self.between.join(some) + self.end

        used = fill(items, render, request.count, request.length, self.name)
        questions = self.questions(used, request, drawn)
        return Context(self.name, f"{request.length} tokens, {number}", render(used), tuple(questions), request.length)

    @abstractmethod
    def items(self, most: int, drawn: random.Random) -> list[str]:
        """Draw `most` items, or fewer if there are not as many different items."""

    @abstractmethod
    def questions(self, items: list[str], request: Request, drawn: random.Random) -> list[Question]:
        """Make the requested number of questions about the document's items.

        Raises:
            UsageError: the document has too few items, or the task has fewer questions than requested.
        """

    def asked_items(self, items: list[str], request: Request, drawn: random.Random) -> list[str]:
        """Return evenly spread items, one for each question, in random order, so that a turn has no fixed depth.

        Raises:
            UsageError: there are fewer items than questions.
        """
        asked = request.asked()
        self.check(len(items), asked, request, ", or fewer --questions")
        places = nearest([(one + 0.5) / asked for one in range(asked)], len(items))
        return [items[place] for place in drawn.sample(places, asked)]

    def check(self, items: int, least: int, request: Request, remedy: str = "") -> None:
        """Raise UsageError if the document has fewer than `least` items. `remedy` ends the message."""
        if items < least:
            raise UsageError(
                f"--length {request.length} is too small for {self.name}: the list has {items} of the {least} items "
                f"that the task needs; give more tokens{remedy}"
            )


class KeyValues(ItemList):
    """A JSON object of random UUIDs. The questions ask for the values of keys."""

    name = "scbench-kv"
    introduction = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
    between = ", "
    end = "}"

    def items(self, most: int, drawn: random.Random) -> list[str]:
        return [f'"{key}": "{value}"' for key, value in zip(uuids(most, drawn), uuids(most, drawn), strict=True)]

    def questions(self, items: list[str], request: Request, drawn: random.Random) -> list[Question]:
        pairs = [item.split('"')[1::2] for item in self.asked_items(items, request, drawn)]
        return [
            Question(
                text=f'Key: "{key}"',
                prefix="The value associated with the specified key is:",
                answers=(value,),
                metric="substring",
                max_new_tokens=TOKENS_A_UUID,
            )
            for key, value in pairs
        ]


ENDS, MIDDLE = 4, 8
"""Number of letters of a string's prefix or suffix, and number of letters between prefix and suffix."""


class PrefixesSuffixes(ItemList):
    """Random strings. A question asks for the only string with a prefix and a suffix.

    Prefixes and suffixes are drawn from small pools, so that many other strings have the prefix or the suffix.
    """

    name = "scbench-prefix-suffix"
    introduction = "Below is a list of strings. I will ask you for a string by its prefix and its suffix.\n\n["
    between = ", "
    end = "]"

    def items(self, most: int, drawn: random.Random) -> list[str]:
        pool = 2 + int((2 * most) ** 0.5)
        prefixes = coined(pool, ENDS, string.ascii_lowercase, drawn)
        suffixes = coined(pool, ENDS, string.ascii_lowercase, drawn)
        middles = coined(most, MIDDLE, string.ascii_lowercase, drawn)
        pairs = drawn.sample(range(pool * pool), most)
        return [
            f'"{prefixes[pair // pool]}{middle}{suffixes[pair % pool]}"'
            for pair, middle in zip(pairs, middles, strict=True)
        ]

    def questions(self, items: list[str], request: Request, drawn: random.Random) -> list[Question]:
        return [
            Question(
                text=f'Find the string with the prefix "{whole[:ENDS]}" and the suffix "{whole[-ENDS:]}".',
                prefix="The string is:",
                answers=(whole,),
                metric="substring",
                max_new_tokens=2 * ENDS + MIDDLE + 4,
            )
            for whole in (item.strip('"') for item in self.asked_items(items, request, drawn))
        ]


RANKS = {
    "largest": -1,
    "smallest": 0,
    "second largest": -2,
    "second smallest": 1,
    "third largest": -3,
    "third smallest": 2,
}
"""Index in the sorted list of each number, except the median, that a question can ask for."""
LARGEST = 999_999


class NumberFinding(ItemList):
    """A list of an odd number of different numbers. The questions ask for the largest, the median and others."""

    name = "scbench-mf"
    introduction = "Find the largest, the smallest, the median and other numbers of the following list.\n\n["
    between = ", "
    end = "]"

    def items(self, most: int, drawn: random.Random) -> list[str]:
        # Each item but the first has two numbers, so that the list has one number in its middle.
        first, *others = drawn.sample(range(LARGEST + 1), min(2 * most - 1, LARGEST))
        return [str(first), *(f"{one}, {other}" for one, other in zip(others[::2], others[1::2], strict=True))]

    def questions(self, items: list[str], request: Request, drawn: random.Random) -> list[Question]:
        listed = sorted(int(one) for item in items for one in item.split(", "))
        self.check(len(listed), len(RANKS) + 1, request)
        ranks, asked = RANKS | {"median": len(listed) // 2}, request.asked()
        if asked > len(ranks):
            raise UsageError(f"--questions {asked}: {self.name} has {len(ranks)} at most per context; give fewer")
        return [
            Question(
                text=f"What is the {rank} number of the list? Answer with only one number, no other words.",
                prefix=f"The {rank} number of the list is:",
                answers=(str(listed[ranks[rank]]),),
                metric="number",
                max_new_tokens=12,
            )
            for rank in drawn.sample(list(ranks), asked)
        ]


CLASSES, THINGS = 8, 24
"""Number of classes, and number of nouns, each of which has a class."""
LABEL = 6  # letters


class ManyShot(ItemList):
    """Examples of a classification with invented labels. The last word of a thing, a noun, determines its class.

    The questions ask for the classes of things that are not among the examples. Each noun is in an example.
    """

    name = "scbench-many-shot"
    introduction = "Each thing below has a class. Learn from the examples how things are classified.\n\n"

    def items(self, most: int, drawn: random.Random) -> list[str]:
        nouns, labels = drawn.sample(NOUNS, THINGS), coined(CLASSES, LABEL, string.ascii_lowercase, drawn)
        return [
            f"{' '.join(drawn.sample(ADJECTIVES, 2))} {nouns[place % THINGS]}: {labels[place % THINGS % CLASSES]}"
            for place in range(most)
        ]

    def questions(self, items: list[str], request: Request, drawn: random.Random) -> list[Question]:
        self.check(len(items), THINGS, request)
        shown = {item.split(": ")[0] for item in items}
        labels = dict(re.split(" |: ", item)[2:] for item in items)
        return [
            Question(
                text=f"Of which class is the {thing}? Answer with the class only.",
                prefix=f"The class of the {thing} is:",
                answers=(labels[thing.split()[-1]],),
                metric="substring",
                max_new_tokens=12,
            )
            for thing in self._unseen(list(labels), request.asked(), shown, drawn)
        ]

    def _unseen(self, nouns: list[str], number: int, shown: set[str], drawn: random.Random) -> list[str]:
        """Draw `number` things that are not in `shown`. No noun occurs again before all nouns have occurred."""
        drawn.shuffle(nouns)
        things: list[str] = []
        while len(things) < number:
            thing = f"{' '.join(drawn.sample(ADJECTIVES, 2))} {nouns[len(things) % len(nouns)]}"
            if thing not in shown:
                things.append(thing)
        return things


for task in (KeyValues(), PrefixesSuffixes(), NumberFinding(), ManyShot()):
    tasks.add(task.name, task)
