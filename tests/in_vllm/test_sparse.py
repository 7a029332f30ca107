"""A server whose decode steps attend by codes gives the answers of `sparsekv generate`, beside dense requests."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from support.python_help import DOCUMENT
from support.vllm_engine import Engine, Reply, engine
from support.vllm_library import Library

from sparsekv.runtime.tasks.interface import Question, Request, tasks

pytestmark = pytest.mark.vllm

CONNECTOR = ("sparsekv.runtime.vllm.connector", "SparseKVConnector")
AT_ONCE = 48
QUESTIONS = [
    "Which method is called to implement attribute deletion?",
    "What is this text about?",
    "How is attribute access customised?",
    "What does __getattr__ return?",
    "When is __del__ called?",
    "What is a descriptor?",
    "How do I make a class callable?",
    "What is the difference between __str__ and __repr__?",
    "What does __slots__ do?",
    "Which method is used by the with statement?",
    "What is a metaclass?",
    "How are objects compared for equality?",
    "What happens when a name is deleted?",
    "What does the hash of an object depend on?",
    "Explain what a module is.",
    "Which types are immutable?",
    "What is a code object?",
    "How does garbage collection work?",
    "What does None mean?",
    "Give an example of a sequence type.",
]
TOKENS, SOME = 24, 7
BUDGETS: dict[str | None, int] = {None: len(QUESTIONS), "dense": len(QUESTIONS), "2%": SOME, "100%": SOME}
"""Number of the questions that are asked with a budget; without one, the server's."""
FACTS = {"facts0.skv": 0, "facts1.skv": 1}
FACT_BUDGETS = {"facts0.skv": "5%", "facts1.skv": "3%"}
FACT_TOKENS = 12


@dataclass(frozen=True)
class Ask:
    index: str
    question: str
    budget: str | None
    tokens: int


@pytest.fixture(scope="module")
def facts(library: Library) -> dict[str, list[Question]]:
    """Two documents with 30 facts each, and a question about each fact."""

    def count(text: str) -> int:
        return len(library.model.tokenizer(text, add_special_tokens=False)["input_ids"])

    contexts = tasks()["niah-facts"].make(Request(DOCUMENT, count, 1536, contexts=2, questions=30))
    for name, context in zip(FACTS, contexts, strict=True):
        library.build(name, context.text, "--raw")
    return {name: list(context.questions) for name, context in zip(FACTS, contexts, strict=True)}


@pytest.fixture(scope="module")
def sparse(library: Library, facts: dict[str, list[Question]], embedded_folder: Path) -> Iterator[Engine]:
    indices = ["manual.skv", *facts, "int8.skv", "truncated.skv"]
    with engine(embedded_folder, library.folder, indices, CONNECTOR, method="codes", budget="5%") as started:
        yield started


def said(question: Question) -> str:
    return f"{question.text} {question.prefix}"


@pytest.fixture(scope="module")
def replies(library: Library, facts: dict[str, list[Question]], sparse: Engine) -> dict[Ask, str]:
    """All answers, as many at once as there are threads: budgets, dense requests and indices beside each other."""
    asked = [Ask("manual.skv", one, budget, TOKENS) for budget in BUDGETS for one in QUESTIONS[: BUDGETS[budget]]]
    asked += [Ask(name, said(one), FACT_BUDGETS[name], FACT_TOKENS) for name in facts for one in facts[name]]
    mixed = Random(0).sample(asked, len(asked))

    def text(ask: Ask) -> str:
        return sparse.ask(library.prompt(ask.index, ask.question), ask.tokens, ask.budget).text

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return dict(zip(mixed, threads.map(text, mixed), strict=True))


def texts(replies: dict[Ask, str], budget: str | None) -> list[str]:
    return [replies[Ask("manual.skv", one, budget, TOKENS)].strip() for one in QUESTIONS[: BUDGETS[budget]]]


@pytest.mark.parametrize("budget", [None, "2%"])
def test_the_text_is_that_of_generate(library: Library, replies: dict[Ask, str], budget: str | None) -> None:
    options = ("--method", "codes", "--budget", budget or "5%")
    expected = library.generated("manual.skv", QUESTIONS[: BUDGETS[budget]], TOKENS, *options)
    found = texts(replies, budget)
    assert found == [text.strip() for text in expected]
    assert found != texts(replies, "dense")[: len(found)]


def test_a_budget_of_everything_gives_the_dense_text(replies: dict[Ask, str]) -> None:
    assert texts(replies, "100%") == texts(replies, "dense")[:SOME]


def test_facts_are_found_as_by_generate(
    library: Library, facts: dict[str, list[Question]], replies: dict[Ask, str], capsys: pytest.CaptureFixture[str]
) -> None:
    right = 0
    for name, questions in facts.items():
        asked, budget = [said(question) for question in questions], FACT_BUDGETS[name]
        found = [replies[Ask(name, text, budget, FACT_TOKENS)].strip() for text in asked]
        expected = library.generated(name, asked, FACT_TOKENS, "--method", "codes", "--budget", budget)
        assert found == [text.strip() for text in expected]
        right += sum(question.answers[0] in text for question, text in zip(questions, found, strict=True))
    with capsys.disabled():
        print(f"\n{right} of 60 facts found")
    assert right >= 40


def test_a_wrong_budget_is_logged_and_answered_densely(
    library: Library, sparse: Engine, replies: dict[Ask, str]
) -> None:
    asked = QUESTIONS[1]
    reply = sparse.ask(library.prompt("manual.skv", asked), TOKENS, "much")
    assert reply.text == replies[Ask("manual.skv", asked, "dense", TOKENS)]
    (line,) = [line for line in sparse.lines() if "attends densely" in line]
    assert "sparsekv_budget much is not a budget" in line


def test_an_index_without_codes_is_answered_densely(library: Library, sparse: Engine) -> None:
    prompt = library.prompt("int8.skv")
    assert sparse.ask(prompt).text == sparse.ask(prompt, budget="dense").text
    (line,) = [line for line in sparse.lines() if "attend densely" in line]
    assert line.startswith("index int8.skv: its requests attend densely: ")
    assert "add it with" in line


def test_the_log_says_what_decodes_sparsely(sparse: Engine, replies: dict[Ask, str]) -> None:
    lines = sparse.lines()
    assert "decode steps over an index: codes within 5%" in lines
    indices = {ask.index for ask in replies}
    told = [line for line in lines if line.endswith("is the first to decode sparsely")]
    assert sorted(line.split(": ")[0] for line in told) == sorted(f"index {name}" for name in indices)


def test_an_index_that_is_refused_stays_refused(sparse: Engine) -> None:
    assert any(line.startswith("index truncated.skv is not used: ") for line in sparse.lines())


def test_tokens_by_codes_and_by_dense_attention_take_times(
    library: Library, sparse: Engine, replies: dict[Ask, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the times, of requests in turn."""
    prompt, times = library.prompt("manual.skv", QUESTIONS[2]), dict[str, list[float]]()
    for _ in range(3):
        for budget in ("dense", "5%"):
            reply: Reply = sparse.ask(prompt, 48, budget)
            times.setdefault(budget, []).append(1000 * reply.later)
    with capsys.disabled():
        told = "; ".join(f"{budget}: {', '.join(f'{one:.0f}' for one in each)}" for budget, each in times.items())
        print(f"\nms for each token of an answer over {len(prompt):,} tokens: {told} (load {os.getloadavg()[0]:.1f})")
