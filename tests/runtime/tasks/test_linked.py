"""Tasks of linked facts: answers follow from facts in the text, and the question's words alone do not lead to them."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.eval_tasks import count_words, request

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.tasks.interface import Context, tasks
from sparsekv.runtime.tasks.linked import CABINETS, LINKS, NAMES, PLACES, LinkedFacts, MultiHop

LINKED = [name for name, task in tasks().items() if isinstance(task, LinkedFacts)]
LINK_OF = {needle.replace("{name}", "()"): link for link, needles in LINKS.items() for needle in needles}
NEEDLE = "|".join(
    needle.replace(".", r"\.").replace("{name}", r"\w+") for needles in LINKS.values() for needle in needles
)
HOP = (
    r"(?:The key of the ([a-z ]+) is kept by|([A-Z][a-z]+) (?:gives everything to|stores everything in the))"
    r" (\w+)(?: cabinet)?\."
)
APPLES = r"(\w+) has (\d+) (?:apples|(more|fewer) apples than (\w+))\."


def _places(context: Context, fact: str) -> tuple[dict[str, int], int]:
    """The number of the haystack's characters before each fact, and in all. The facts themselves do not count."""
    body, facts = context.text[context.text.index("\n") + 1 :], 0
    places = {}
    for match in re.finditer(fact, body):
        places[match[0]] = match.start() - facts
        facts += len(match[0]) + 1
    return places, len(body) - facts


def _stems(text: str) -> set[str]:
    """The first four letters of all words of at least four letters."""
    return {word[:4] for word in re.findall(r"[a-z]{4,}", text.lower())}


def test_no_needle_has_a_word_that_resembles_a_word_of_a_question() -> None:
    (context,) = tasks()["niah-semantic"].make(request(length=3000, contexts=1, questions=len(LINKS)))
    asked = {stem for question in context.questions for stem in _stems(question.text + question.prefix)}
    assert len(LINKS) >= 30
    assert _stems(" ".join(LINKS)) <= asked
    for needles in LINKS.values():
        assert len(needles) >= 2
        for needle in needles:
            assert not _stems(needle.replace("{name}", "")) & asked


@pytest.mark.parametrize("words", [NAMES, PLACES, CABINETS])
def test_no_answer_is_part_of_another(words: tuple[str, ...]) -> None:
    assert [one for one in words for other in words if one.lower() in other.lower()] == [*words]


@settings(max_examples=10)
@given(st.integers(0, 99), st.integers(500, 3000), st.integers(1, 10), st.floats(0, 1))
def test_a_semantic_needle_stands_at_its_depth_and_fits_no_other_question(
    seed: int, length: int, questions: int, depth: float
) -> None:
    asked = request(seed=seed, length=length, questions=questions, contexts=1, depths=(depth,))
    (context,) = tasks()["niah-semantic"].make(asked)
    places, size = _places(context, NEEDLE)
    links = [LINK_OF[re.sub("|".join(NAMES), "()", needle)] for needle in places]
    assert len(places) == len({*links}) == max(8, questions)
    for question in context.questions:
        (name,) = question.answers
        ((needle, link),) = [pair for pair in zip(places, links, strict=True) if name in pair[0]]
        assert (question.text, question.prefix) == (
            f"Which person {link}? Give only the name.",
            f"The person who {link} is",
        )
        assert question.depth == context.text.index(needle) / len(context.text)
        assert question.placed == depth
        # at most one sentence away, of which the longest have 400 characters
        assert abs(places[needle] - depth * size) <= 402
    assert count_words(context.text) <= length


def test_semantic_needles_are_spread_evenly_in_random_order() -> None:
    orders = []
    for context in tasks()["niah-semantic"].make(request(length=4000, contexts=4, questions=5)):
        depths = [question.depth or 0.0 for question in context.questions]
        assert sorted(depths) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.06)
        orders.append(sorted(range(5), key=depths.__getitem__))
    assert len({*map(tuple, orders)}) > 1


@settings(max_examples=10)
@given(st.sampled_from([2, 3]), st.integers(0, 99), st.integers(800, 3000), st.integers(1, 10))
def test_a_chain_leads_to_its_cabinet_over_facts_that_lie_apart(
    hops: int, seed: int, length: int, questions: int
) -> None:
    (context,) = MultiHop(hops).make(request(seed=seed, length=length, questions=questions, contexts=1))
    places, size = _places(context, HOP)
    facts = {fact[1] or fact[2]: fact[3] for fact in re.finditer(HOP, context.text)}
    at = dict(zip(facts, places.values(), strict=True))
    # every chain has the same form, and none shares a person or a cabinet with another
    assert len(facts) == len({*facts.values()}) == hops * max(8, questions)
    for question in context.questions:
        chain = [*re.findall(r"the key of the ([a-z ]+)\?", question.text)]
        while chain[-1] in facts:
            chain.append(facts[chain[-1]])
        assert len(chain) == hops + 1
        assert question.answers == (chain[-1],)
        assert not any(word in question.text + question.prefix for word in chain[1:])
        for one, other in pairwise(chain[:-1]):
            assert at[other] - at[one] >= size / (2 * hops) - 2 * 402


@settings(max_examples=10)
@given(st.integers(0, 99), st.integers(800, 3000), st.integers(1, 10))
def test_a_sum_follows_from_two_facts_that_lie_apart(seed: int, length: int, questions: int) -> None:
    (context,) = tasks()["sums"].make(request(seed=seed, length=length, questions=questions, contexts=1))
    places, size = _places(context, APPLES)
    facts = {fact[1]: (fact, at) for fact, at in zip(re.finditer(APPLES, context.text), places.values(), strict=True)}
    stated = {int(fact[2]) for fact, _ in facts.values()}
    assert len(facts) == 2 * max(8, questions)
    for question in context.questions:
        (one,) = re.findall(r"does (\w+) have", question.text)
        relation, at = facts[one]
        given_number, other_at = facts[relation[4]]
        total = int(given_number[2]) + (1 if relation[3] == "more" else -1) * int(relation[2])
        assert question.answers == (str(total),)
        assert 10 <= total <= 99
        assert total not in stated
        assert abs(at - other_at) >= size / 4 - 2 * 402


@pytest.mark.parametrize("name", LINKED)
def test_more_questions_than_there_are_facts_are_refused(name: str) -> None:
    task = tasks()[name]
    assert isinstance(task, LinkedFacts)
    with pytest.raises(UsageError, match=f"--questions {task.most + 1}: {name} has {task.most} at most per context"):
        task.make(request(questions=task.most + 1))
    for context in task.make(request(questions=task.most, length=3000)):
        assert len({question.answers for question in context.questions}) == task.most
