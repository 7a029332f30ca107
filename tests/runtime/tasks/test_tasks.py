"""Generated tasks as properties: the answers stand where they should, sizes are kept, the seed decides everything."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.eval_tasks import PAIRS, count_words, request
from support.python_help import BY_NAME

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.tasks.haystack import Needles, NeedlesAlone, nearest
from sparsekv.runtime.tasks.interface import Context, tasks
from sparsekv.runtime.tasks.linked import LinkedFacts
from sparsekv.runtime.tasks.metrics import METRICS
from sparsekv.runtime.tasks.published import cut_note
from sparsekv.runtime.tasks.scbench import ItemList

NEEDLES = [name for name, task in tasks().items() if isinstance(task, Needles)]
ALONE = [name for name, task in tasks().items() if isinstance(task, NeedlesAlone)]
LISTS = [name for name, task in tasks().items() if isinstance(task, ItemList)]
LINKED = [name for name, task in tasks().items() if isinstance(task, LinkedFacts)]
NEEDLE = r"(?:One of the special magic numbers for ([a-z]+-[a-z]+) is:|The ([A-Za-z ]+) is) (\d{7})\."
SEEDED = [name for name in tasks() if name != "qa"]  # a person's questions are the same under any seed


@pytest.mark.parametrize("name", tasks())
def test_every_task_keeps_to_its_size(name: str) -> None:
    asked = request()
    for context in tasks()[name].make(asked):
        assert 0.75 * asked.length < count_words(context.text) <= asked.length
        assert (context.task, context.length) == (name, asked.length)
        assert 1 <= len(context.questions) <= 3
        for question in context.questions:
            assert question.answers or METRICS[question.metric].of_dense
            assert all(question.answers)
            assert question.metric in METRICS
            assert question.max_new_tokens > 0


@pytest.mark.parametrize("name", SEEDED)
def test_the_seed_decides_everything(name: str) -> None:
    made = tasks()[name].make(request(seed=1))
    assert made == tasks()[name].make(request(seed=1))
    assert made != tasks()[name].make(request(seed=2))
    assert len({context.text for context in made}) == len({context.name for context in made}) == 2


@pytest.mark.parametrize("name", SEEDED)
def test_more_contexts_begin_with_the_same_ones(name: str) -> None:
    """So that a run that is made larger keeps its answers; where things are spread evenly they move, and say so."""
    asked = request(depths=(0.5,), contexts=2)
    more = tasks()[name].make(replace(asked, contexts=3))
    if name not in ("perplexity", "long-answer"):
        assert more[:2] == tasks()[name].make(asked)
    assert len(more) == 3


def _needles(context: Context) -> Counter[str]:
    return Counter((pair or thing, value) for pair, thing, value in re.findall(NEEDLE, context.text))


@pytest.mark.parametrize(
    ("name", "questions", "needles", "answers"),
    [
        ("niah-single", 1, 1, 1),
        ("niah-facts", 3, 4, 1),
        ("niah-multikey", 3, 4, 1),
        ("niah-multivalue", 3, 12, 4),
        ("niah-multiquery", 3, 4, 4),
    ],
)
def test_needles_are_as_many_as_the_form_has(name: str, questions: int, needles: int, answers: int) -> None:
    for context in tasks()[name].make(request()):
        hidden = _needles(context)
        assert (len(context.questions), len(hidden)) == (questions, needles)
        for question in context.questions:
            assert len(question.answers) == answers
            # exactly the values of the keys that are asked for, each hidden once
            assert Counter(question.answers) == Counter(
                value for (key, value), times in hidden.items() if key in question.text for _ in range(times)
            )


@settings(max_examples=15)
@given(st.sampled_from(NEEDLES), st.integers(0, 99), st.integers(400, 3000), st.integers(1, 6), st.floats(0, 1))
def test_a_needle_stands_at_its_depth(name: str, seed: int, length: int, questions: int, depth: float) -> None:
    asked = request(seed=seed, length=length, questions=questions, depths=(depth,), contexts=1)
    (context,) = tasks()[name].make(asked)
    body = context.text[context.text.index("\n") + 1 :]
    hay = re.sub(f"{NEEDLE} ?", "", body)
    for found in re.finditer(NEEDLE, body):
        before = re.sub(f"{NEEDLE} ?", "", body[: found.start()])
        # at most one sentence away, of which the longest have 400 characters
        assert abs(len(before) - depth * len(hay)) <= 402
    assert all(one.placed == (None if one.depth is None else depth) for one in context.questions)
    assert count_words(context.text) <= length


@pytest.mark.parametrize("name", ALONE)
def test_every_line_is_a_needle_and_questions_are_spread_over_them(name: str) -> None:
    for context in tasks()[name].make(request(length=2000)):
        _, *lines = context.text.split("\n")
        said = dict(
            re.fullmatch(r"One of the special magic \w+ for (\S+) is: (\S+)\.", line).groups() for line in lines
        )
        assert len(said) == len(set(said.values())) == len(lines)
        places = []
        for question in context.questions:
            (key,) = (key for key in said if key in question.text)
            assert key in question.prefix
            assert question.answers == (said[key],)
            places.append([*said].index(key) / len(lines))
        assert places == pytest.approx([1 / 6, 3 / 6, 5 / 6], abs=0.02)
        assert [question.depth for question in context.questions] == pytest.approx(places, abs=0.05)


def test_the_longest_contexts_have_keys_enough() -> None:
    (context,) = tasks()["niah-multikey-2"].make(request(length=350_000, contexts=1))
    assert count_words(context.text) > 340_000


@given(st.lists(st.floats(0, 1), max_size=5), st.integers(5, 40))
def test_each_depth_takes_a_line_of_its_own_near_it(depths: list[float], lines: int) -> None:
    taken = nearest(depths, lines)
    assert len({*taken}) == len(depths)
    for depth, line in zip(depths, taken, strict=True):
        assert abs(line + 0.5 - depth * lines) <= len(depths)


def test_a_document_without_room_for_its_questions_is_refused() -> None:
    with pytest.raises(UsageError, match="too small for niah-multikey-3"):
        tasks()["niah-multikey-3"].make(request(length=60, questions=9))


def test_a_single_needle_moves_through_the_contexts() -> None:
    made = tasks()["niah-single"].make(request(length=3000, contexts=4))
    depths = [context.questions[0].depth for context in made]
    assert depths == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.06)


def test_depths_are_taken_in_turn() -> None:
    (context,) = tasks()["niah-multikey"].make(request(length=3000, contexts=1, questions=4, depths=(0.0, 1.0)))
    depths = sorted(question.depth or 0.0 for question in context.questions)
    assert depths == pytest.approx([0, 0, 1, 1], abs=0.06)


@pytest.mark.parametrize(("name", "chains"), [("vt", 3), ("scbench-vt", 10)])
def test_chains_of_variables_can_be_followed(name: str, chains: int) -> None:
    for context in tasks()[name].make(request()):
        assert len(context.questions) == 3
        assert len(re.findall(r"VAR \w{5} = \d{5}\.", context.text)) == chains
        said = [(match[1], match[2]) for match in re.finditer(r"VAR (\w{5}) = (?:VAR )?(\w{5})\.", context.text)]
        for question in context.questions:
            value = re.findall(r"\d{5}", question.text)[0]
            held = {value}
            for name, source in said:  # in order of the text: each is assigned after what it is assigned
                held |= {name} if source in held else set()
            assert held - {value} == set(question.answers)
            assert len(question.answers) == 5


@pytest.mark.parametrize("name", [*LISTS, *LINKED, "scbench-vt"])
def test_a_scorer_finds_the_right_answers_and_no_others(name: str) -> None:
    for context in tasks()[name].make(request(questions=5)):
        right = {question: f" {', '.join(question.answers)}." for question in context.questions}
        assert len(right) == 5
        for question in context.questions:
            scores = {text: METRICS[question.metric].score(text, question) for text in right.values()}
            assert {text for text, score in scores.items() if score} == {right[question]}
            assert scores[right[question]] == 1


@settings(max_examples=10)
@given(st.integers(0, 99), st.integers(400, 3000), st.integers(1, 7))
def test_right_answers_follow_from_the_lists(seed: int, length: int, questions: int) -> None:
    asked = request(seed=seed, length=length, questions=questions, contexts=1)
    (pairs,), (strings,), (numbers,), (shots,) = (
        tasks()[f"scbench-{name}"].make(asked) for name in ("kv", "prefix-suffix", "mf", "many-shot")
    )
    stored = json.loads(pairs.text.split("JSON data:\n")[1])
    for question in pairs.questions:
        assert (stored[question.text.split('"')[1]],) == question.answers
    listed = json.loads(strings.text.split("\n\n")[1])
    for question in strings.questions:
        prefix, suffix = re.findall('"(.+?)"', question.text)
        assert (*(one for one in listed if one.startswith(prefix) and one.endswith(suffix)),) == question.answers
    ordered = sorted(json.loads(numbers.text.split("\n\n")[1]))
    assert len({*ordered}) == len(ordered)
    ranks = {"third": 2, "second": 1, "largest": 0, "smallest": 0, "median": len(ordered) // 2}
    for question in numbers.questions:
        rank = next(place for word, place in ranks.items() if word in question.text)
        assert question.answers == (str(ordered[-1 - rank if "largest" in question.text else rank]),)
    assert len(ordered) % 2 == 1
    examples = dict(line.split(": ") for line in shots.text.split("\n\n")[1].split("\n"))
    for question in shots.questions:
        thing = question.text.split(" is the ")[1].split("?")[0]
        assert thing not in examples
        assert {(label,) for one, label in examples.items() if one.split()[-1] == thing.split()[-1]} == {
            question.answers
        }


@pytest.mark.parametrize("name", ["scbench-kv", "scbench-prefix-suffix"])
def test_requests_are_spread_over_a_list_in_random_order(name: str) -> None:
    """So that a turn's scores are not those of one depth."""
    orders = []
    for context in tasks()[name].make(request(length=4000, contexts=4, questions=5)):
        places = [context.text.index(question.answers[0]) / len(context.text) for question in context.questions]
        assert sorted(places) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.05)
        orders.append(sorted(range(5), key=places.__getitem__))
    assert len({*map(tuple, orders)}) > 1


def test_other_strings_have_the_prefix_or_the_suffix() -> None:
    (context,) = tasks()["scbench-prefix-suffix"].make(request(length=4000, contexts=1))
    listed = json.loads(context.text.split("\n\n")[1])
    for question in context.questions:
        (right,) = question.answers
        assert sum(one.startswith(right[:4]) for one in listed) > 5
        assert sum(one.endswith(right[-4:]) for one in listed) > 5


@pytest.mark.parametrize(("name", "most"), [("scbench-mf", 7), ("long-answer", 5)])
def test_more_questions_than_there_are_are_refused(name: str, most: int) -> None:
    assert len(tasks()[name].make(request(questions=most))[0].questions) == most
    with pytest.raises(UsageError, match=f"--questions {most + 1}: {name} has {most} at most per context"):
        tasks()[name].make(request(questions=most + 1))


@pytest.mark.parametrize("length", [1000, 5000])
def test_common_words_are_the_most_common(length: int) -> None:
    (context,) = tasks()["cwe"].make(request(length=length, contexts=1))
    listed = Counter(re.findall(r"\d+\. (\w+)", context.text))
    times = [count for _, count in listed.most_common()]
    assert set(context.questions[0].answers) == {word for word, _ in listed.most_common(10)}
    assert times[9] > times[10]


def test_frequent_words_follow_zipf() -> None:
    (context,) = tasks()["fwe"].make(request(length=4000, contexts=1))
    coded = Counter(re.findall(r"\b[a-z]{6}\b", context.text.split("coded words. ")[1]))
    ranked = coded.most_common()
    assert tuple(word for word, _ in ranked[:3]) == context.questions[0].answers
    # the dots are first, so that ranks begin with two: counts as 1/4, 1/9, 1/16
    assert ranked[0][1] / ranked[1][1] == pytest.approx(9 / 4, rel=0.05)
    assert ranked[1][1] / ranked[2][1] == pytest.approx(16 / 9, rel=0.05)


def test_a_question_whose_answer_was_cut_off_is_not_asked() -> None:
    late = ("What comes late?", (BY_NAME[-300:-280],))
    (context,) = tasks()["qa"].make(request(pairs=(*PAIRS, late)))
    assert BY_NAME.startswith(context.text)
    assert [question.answers for question in context.questions] == [PAIRS[0][1], PAIRS[1][1]]
    assert [question.depth is None for question in context.questions] == [False, True]
    with pytest.raises(UsageError, match="no answer of --pairs"):
        tasks()["qa"].make(request(pairs=(late,)))


def test_the_tokens_of_a_very_long_text_are_estimated() -> None:
    asked = request(text="A cat sat here. " * 10_000, length=200, pairs=(("Who sat?", ("cat",)),))
    (context,) = tasks()["qa"].make(asked)
    line = cut_note(context, asked, "cats.txt")
    assert line == "--task qa asks about the first 200 of about 50,000 tokens of cats.txt; a larger --length takes more"


def test_a_short_text_is_asked_about_whole() -> None:
    (context,) = tasks()["qa"].make(request(text="A cat sat here. It was red.", pairs=(("Who sat?", ("cat",)),)))
    assert context.text == "A cat sat here. It was red."


def test_a_continuation_follows_its_context() -> None:
    for context in tasks()["perplexity"].make(request()):
        assert context.bare
        assert context.text + context.questions[0].answers[0] in BY_NAME


@pytest.mark.parametrize("name", [name for name in tasks() if name not in ("cwe", "fwe", "qa", *ALONE, *LISTS)])
def test_a_text_that_is_too_short_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"the text is too short for --task {name}:"):
        tasks()[name].make(request(text="One short sentence. " * 20))


@pytest.mark.parametrize(
    ("name", "needles", "more"),
    [
        ("niah-single", 2, "--contexts"),
        ("niah-facts", 4, "--questions"),
        ("niah-multikey-2", 3, "--questions"),
        ("niah-semantic", 3, "--questions"),
    ],
)
def test_depths_that_no_needle_would_have_are_refused(name: str, needles: int, more: str) -> None:
    depths = tuple(one / 10 for one in range(needles + 1))
    made = tasks()[name].make(request(depths=depths[:-1], length=2000))
    asked = [round(one.depth or 0.0, 1) for context in made for one in context.questions]
    assert name == "niah-facts" or len({*asked}) == needles
    with pytest.raises(UsageError, match=f"only {needles} needles are hidden; .*, or {more} {needles + 1}$"):
        tasks()[name].make(request(depths=depths, length=2000))


def test_common_words_of_a_text_with_too_few_words_are_refused() -> None:
    """More words than the text's and the task's own are not made up, so the list would be shorter than it is named."""
    with pytest.raises(UsageError, match=r"too short for --task cwe: --length is 16000 .* give --length \d+, or "):
        tasks()["cwe"].make(request(text="One short sentence. " * 2000, length=16_000, contexts=1))


@pytest.mark.parametrize(("sentences", "shorter"), [(20, ""), (300, r"--length \d+, or ")])
def test_a_length_is_suggested_only_if_it_leaves_something_to_index(sentences: int, shorter: str) -> None:
    with pytest.raises(UsageError, match=rf"of the whole text has [\d,]+; give {shorter}a longer text$"):
        tasks()["niah-facts"].make(request(text="One short sentence. " * sentences, length=8192))


def test_there_are_not_facts_without_end() -> None:
    with pytest.raises(UsageError, match="--questions 31: niah-facts has 30"):
        tasks()["niah-facts"].make(request(questions=31))


@pytest.mark.parametrize("name", [name for name in tasks() if name not in ("qa", "perplexity", "long-answer")])
def test_a_length_that_is_too_small_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--length 20 is too small for {name}"):
        tasks()[name].make(request(length=20))


@pytest.mark.parametrize(
    ("name", "needed", "remedy"),
    [
        ("scbench-mf", 7, "give more tokens"),
        ("scbench-many-shot", 24, "give more tokens"),
        ("scbench-kv", 3, "give more tokens, or fewer --questions"),
    ],
)
def test_fewer_questions_are_a_remedy_only_where_they_determine_the_length(name: str, needed: int, remedy: str) -> None:
    with pytest.raises(UsageError, match=rf"of the {needed} items that the task needs; {remedy}$"):
        tasks()[name].make(request(length=30))
