"""Tracing a real model's answer about a made-up fact: where it is read, and what it is without it."""

import json
from pathlib import Path

import pytest
from support.command import sparsekv
from support.python_help import DOCUMENT

FACT = "The lighthouse of Gravenholm is painted in the colour turquoise."
QUESTION = "In which colour is the lighthouse of Gravenholm painted?"


@pytest.fixture(scope="module")
def fact_index(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 300 tokens of technical prose with a sentence of another kind in their middle."""
    folder = tmp_path_factory.mktemp("fact")
    paragraphs = DOCUMENT[:1250].split("\n\n")
    paragraphs.insert(len(paragraphs) // 2, FACT)
    (folder / "fact.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    done = sparsekv("build-index", "fact.txt", "--method", "codes", "-q", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "fact.skv"


def test_the_first_source_of_an_answer_is_its_fact(fact_index: Path) -> None:
    options = ("--sources", "3", "--max-new-tokens", "14")
    done = sparsekv("generate", "--index", fact_index, QUESTION, *options, cwd=fact_index.parent)
    assert done.returncode == 0, done.stderr
    assert "turquoise" in done.stdout
    first = next(line for line in done.stderr.splitlines() if line.startswith("source: "))
    line = (fact_index.parent / "fact.txt").read_text(encoding="utf-8").splitlines().index(FACT) + 1
    assert first.startswith(f"source: fact:{line} ")


def test_an_answer_is_traced_to_its_fact_and_is_another_without_it(fact_index: Path) -> None:
    options = ("--truth", "--without", FACT, "--max-new-tokens", "14", "--json")
    done = sparsekv("trace", "--index", fact_index, QUESTION, *options, cwd=fact_index.parent)
    assert done.returncode == 0, done.stderr
    trace = json.loads(done.stdout)
    assert "turquoise" in trace["answer"]
    assert "turquoise" not in trace["without"]["answer"]
    for name in ("log_probability", "dense_log_probability"):
        shown, hidden = trace["without"][name]
        assert hidden < shown - 5
    texts = ["".join(one["tokens"]) for one in trace["passages"]]
    (fact,) = [number for number, text in enumerate(texts) if FACT in text]
    token = next(number for number, text in enumerate(trace["answer_tokens"]) if "tur" in text)
    # Of all passages, the step that says the colour weighs the fact's most.
    assert trace["by_token"][token]["passages"][0][0] == fact
