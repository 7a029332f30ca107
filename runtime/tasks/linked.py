"""Generate tasks whose answers share no words with their questions, or follow from several facts in the text.

`niah-semantic` is like NoLiMa (arXiv 2502.05167), and `sums` is an easy form of GSM-Infinite (arXiv 2502.05252).
"""

import random
import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.tasks.haystack import TOKENS_A_VALUE, depth_of, hide, rotated, sentences
from sparsekv.runtime.tasks.interface import Context, DrawnTask, Question, Request, tasks

NAMES = re.findall(
    r"\w+",
    """
    Agnes Albert Arthur Beatrice Bernard Bridget Cedric Clement Cordelia Daphne Dorothy Edgar Edith Edmund Eleanor
    Ernest Esther Eugene Felicity Geoffrey Gilbert Gregory Harold Harriet Herbert Horace Howard Hubert Imogen
    Josephine Judith Leonard Lorraine Louisa Lydia Malcolm Marjorie Martha Matilda Maurice Mildred Miriam Muriel
    Nathaniel Oliver Oscar Penelope Percy Philippa Phyllis Priscilla Quentin Ralph Roderick Rosalind Rupert Sylvia
    Theodora Timothy Ursula Vernon Vincent Walter Wilfred Winifred
    """,
)

SIGHTS = {
    "Athens": "the Acropolis",
    "Barcelona": "the Sagrada Familia",
    "Berlin": "the Brandenburg Gate",
    "Brazil": "the statue of Christ the Redeemer",
    "Cambodia": "the temple of Angkor Wat",
    "Cape Town": "Table Mountain",
    "China": "the Great Wall",
    "Copenhagen": "the statue of the Little Mermaid",
    "Dresden": "the Semper Opera House",
    "Dubai": "the Burj Khalifa",
    "Egypt": "the Great Pyramid of Giza",
    "India": "the Taj Mahal",
    "Istanbul": "the Hagia Sophia",
    "Japan": "Mount Fuji",
    "London": "Big Ben",
    "Los Angeles": "the Hollywood sign",
    "Madrid": "the Prado museum",
    "Moscow": "the Kremlin",
    "New York": "the Statue of Liberty",
    "Paris": "the Eiffel Tower",
    "Peru": "the ruins of Machu Picchu",
    "Pisa": "the Leaning Tower",
    "Prague": "Wenceslas Square",
    "Rome": "the Trevi Fountain",
    "San Francisco": "the Golden Gate Bridge",
    "Switzerland": "the Matterhorn",
    "Venice": "the Rialto Bridge",
    "Washington": "the White House",
}
"""A sight of each place. No sight is in two of the places."""

LINKS = {
    f"has been to {place}": (
        f"{{name}} lives next to {sight}.",
        f"Across the street from {sight} is the flat of {{name}}.",
        f"Every evening {{name}} walks the dog around {sight}.",
    )
    for place, sight in SIGHTS.items()
} | {
    "has seen wild kangaroos": ("{name} grew up on a ranch in Australia.", "The outback of Australia raised {name}."),
    "has seen wild penguins": ("{name} spent last winter in Antarctica.", "In Antarctica {name} measured the ice."),
    "cannot eat cheese": ("{name} is allergic to milk.", "Anything made of milk makes {name} ill."),
    "cannot eat bread": ("{name} has to avoid wheat and gluten.", "Wheat and gluten are poison to {name}."),
    "cannot eat beef": ("{name} is a strict vegetarian.", "A vegetarian diet suits {name} well."),
    "cannot hear music": ("{name} is completely deaf.", "An illness in childhood left {name} deaf."),
    "cannot see colours": ("{name} is completely blind.", "An accident in childhood left {name} blind."),
    "is a dentist": ("{name} pulls out rotten teeth all day.", "When a tooth is rotten, patients go to {name}."),
    "is a pilot": ("{name} flies jumbo jets over the ocean.", "In the cockpit of the aeroplane sits {name}."),
    "is a firefighter": ("{name} rescues sleepers from burning houses.", "When a house is burning, they call {name}."),
    "is a baker": ("{name} kneads dough long before sunrise.", "The dough in the oven was kneaded by {name}."),
    "is a barber": ("{name} cuts hair and trims beards.", "Those whose hair is too long go to {name}."),
    "is a farmer": ("{name} milks the cows and ploughs the fields.", "The cows and the tractor belong to {name}."),
    "is a lawyer": ("{name} defends suspects in court.", "In court the suspect was defended by {name}."),
    "is a plumber": ("{name} mends leaking pipes and taps.", "Those whose pipes are leaking call {name}."),
    "is a vet": ("{name} operates on sick cats and dogs.", "Sick cats and dogs are brought to {name}."),
    "is a tailor": ("{name} sews suits and shortens trousers.", "The suit and the trousers were sewn by {name}."),
    "plays chess": ("{name} lost a bishop and both rooks.", "A queen and a rook of {name} forced checkmate."),
    "plays golf": ("{name} needed two putts on the last hole.", "On the last hole {name} missed a short putt."),
    "plays basketball": ("{name} made a slam dunk in the NBA.", "In the NBA a slam dunk made {name} famous."),
}
"""Facts about a person that a question asks for, each with needles that imply the fact by common knowledge.

A needle implies only the fact of its own question, and has no word that resembles a word of any question.
"""

PLACES = (
    "attic",
    "bakery",
    "ballroom",
    "bell tower",
    "boat shed",
    "brewery",
    "chapel",
    "coal cellar",
    "cow barn",
    "dairy",
    "dovecote",
    "engine room",
    "fish market",
    "garage",
    "glasshouse",
    "guest house",
    "gymnasium",
    "hay loft",
    "hen house",
    "ice house",
    "laundry",
    "lighthouse",
    "observatory",
    "orchard gate",
    "pump room",
    "sawmill",
    "stable",
    "tea room",
    "windmill",
    "wine vault",
)

CABINETS = re.findall(
    r"\w+",
    """
    amber azure bamboo beige bronze cedar cherry chestnut copper crimson ebony emerald golden green indigo ivory lilac
    maple marble orange pewter purple scarlet silver turquoise violet walnut white wicker yellow
    """,
)

TOKENS_A_HOP = 16
"""Maximum number of answer tokens for each fact of a chain, which an answer repeats before it names the cabinet."""

TOKENS_A_SUM = 64
"""Maximum number of answer tokens of a sum, for both facts and the calculation."""

GROUPS = 8
"""Minimum number of groups of facts in a context. The facts of questions that are not asked are distractors."""


@dataclass(frozen=True)
class Facts:
    """The sentences that answer one question, each with its depth in the text. The question has no depth yet."""

    hidden: list[tuple[float, str]]
    question: Question


def apart(number: int, drawn: random.Random) -> list[float]:
    """Draw `number` depths from 0 to 1, in order. Neighbours are at least 1 / (2 number) of the text apart."""
    gap = 1 / (2 * number)
    free = sorted(drawn.random() * (1 - gap * (number - 1)) for _ in range(number))
    return [depth + place * gap for place, depth in enumerate(free)]


class LinkedFacts(DrawnTask):
    """A task that hides groups of facts in a text. The facts of a group together answer one question.

    Attributes:
        introduction: the text before the document.
        most: largest number of questions of a context.
    """

    name: ClassVar[str]
    introduction: ClassVar[str]
    most: ClassVar[int]

    def draw(self, request: Request, number: int) -> Context:
        if request.asked() > self.most:
            raise UsageError(
                f"--questions {request.asked()}: {self.name} has {self.most} at most per context; give fewer"
            )
        drawn = random.Random(f"{request.seed} {self.name} {request.length} {number}")
        groups = self.groups(max(GROUPS, request.asked()), request, drawn)
        placed = [fact for group in groups for fact in group.hidden]
        text = hide(rotated(sentences(request.text), drawn), placed, request, self.introduction, self.name)
        questions = tuple(
            replace(group.question, depth=depth_of(text, group.hidden[0][1]), placed=group.hidden[0][0])
            if len(group.hidden) == 1
            else group.question
            for group in groups[: request.asked()]
        )
        return Context(self.name, f"{request.length} tokens, {number}", text, questions, request.length)

    @abstractmethod
    def groups(self, number: int, request: Request, drawn: random.Random) -> list[Facts]:
        """Draw `number` groups of facts with different answers. The context's questions ask for the first groups."""


class SemanticNeedles(LinkedFacts):
    """Sentences about people. Only common knowledge links a question to its needle.

    The needles of the questions have the request's depths, in random order. The other needles are at random depths.
    """

    options = ("--depth",)
    name = "niah-semantic"
    introduction = (
        "Some sentences about people are hidden within the following text. Make sure to memorize them. "
        "I will quiz you about the people afterwards.\n"
    )
    most = len(LINKS)

    def groups(self, number: int, request: Request, drawn: random.Random) -> list[Facts]:
        asked = request.asked()
        depths = [request.depth(one, asked) for one in range(asked)]
        drawn.shuffle(depths)
        depths += [drawn.random() for _ in range(number - asked)]
        names, links = drawn.sample(NAMES, number), drawn.sample(list(LINKS), number)
        return [
            Facts(
                hidden=[(depth, drawn.choice(LINKS[link]).format(name=name))],
                question=Question(
                    text=f"Which person {link}? Give only the name.",
                    answers=(name,),
                    metric="match-all",
                    max_new_tokens=TOKENS_A_VALUE,
                    prefix=f"The person who {link} is",
                ),
            )
            for depth, name, link in zip(depths, names, links, strict=True)
        ]


@dataclass(frozen=True)
class MultiHop(LinkedFacts):
    """Chains of facts, from a key over the people who have it to a cabinet. A question asks for the cabinet of a key.

    The facts of a chain are in order and apart, with text and other chains between them.

    Attributes:
        hops: number of facts of a chain, 2 or 3.
    """

    hops: int = 2

    name = "multi-hop"
    introduction = (
        "Sentences about keys, the people who have them, and their cabinets are hidden within the following text. "
        "Make sure to memorize them. I will ask you for the cabinets of the keys afterwards.\n"
    )
    most = min(len(PLACES), len(CABINETS))

    def groups(self, number: int, request: Request, drawn: random.Random) -> list[Facts]:
        places, cabinets = drawn.sample(PLACES, number), drawn.sample(CABINETS, number)
        people = drawn.sample(NAMES, number * (self.hops - 1))
        return [
            self._chain(place, people[chain::number], cabinet, drawn)
            for chain, (place, cabinet) in enumerate(zip(places, cabinets, strict=True))
        ]

    def _chain(self, place: str, people: list[str], cabinet: str, drawn: random.Random) -> Facts:
        facts = [
            f"The key of the {place} is kept by {people[0]}.",
            *(f"{one} gives everything to {other}." for one, other in pairwise(people)),
            f"{people[-1]} stores everything in the {cabinet} cabinet.",
        ]
        question = Question(
            text=f"In which cabinet is the key of the {place}? Explain with {self.hops} sentences and a conclusion.",
            answers=(cabinet,),
            metric="match-all",
            max_new_tokens=TOKENS_A_HOP * self.hops,
            prefix=f"Explanation: First, the key of the {place} is kept by",
        )
        return Facts(list(zip(apart(self.hops, drawn), facts, strict=True)), question)


class Sums(LinkedFacts):
    """Pairs of facts about people's apples: one person's number, and how many more or fewer a second person has.

    The two facts are in any order. A question asks for the second person's number, which has two digits. No fact states
    a number that is asked for: the numbers in facts are odd, and the numbers that are asked for are even.
    """

    name = "sums"
    introduction = (
        "Sentences about the numbers of people's apples are hidden within the following text. Make sure to memorize "
        "them. I will ask you for numbers that follow from two of the sentences.\n"
    )
    most = len(NAMES) // 2

    def groups(self, number: int, request: Request, drawn: random.Random) -> list[Facts]:
        people, totals = drawn.sample(NAMES, 2 * number), drawn.sample(range(10, 91, 2), number)
        return [
            self._sum(one, other, total, drawn)
            for one, other, total in zip(people[::2], people[1::2], totals, strict=True)
        ]

    def _sum(self, one: str, other: str, total: int, drawn: random.Random) -> Facts:
        difference = drawn.choice((3, 5, 7, 9))
        more = drawn.random() < 0.5
        facts = [
            f"{other} has {total - difference if more else total + difference} apples.",
            f"{one} has {difference} {'more' if more else 'fewer'} apples than {other}.",
        ]
        drawn.shuffle(facts)
        question = Question(
            text=f"How many apples does {one} have? Explain with 2 sentences and a calculation.",
            answers=(str(total),),
            metric="has-number",
            max_new_tokens=TOKENS_A_SUM,
            prefix=f"Explanation: First, {one} has",
        )
        return Facts(list(zip(apart(2, drawn), facts, strict=True)), question)


for task in (SemanticNeedles(), MultiHop(), Sums()):
    tasks.add(task.name, task)
