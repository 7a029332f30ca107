"""Published data in its real form, made up and small: what is indexed, what is asked, what is expected."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.eval_tasks import count_words

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.tasks.interface import Context
from sparsekv.runtime.tasks.metrics import METRICS
from sparsekv.runtime.tasks.published import DATASETS, read_pairs, read_published, shorten

LONGBENCH = {
    "input": "Who sat?",
    "context": "Passage 1:\nA cat sat here.",
    "answers": ["a cat", "cat"],
    "length": 5,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "af1",
}
NIAH = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it.\nThe grass is green. "
)
RULER = {
    "index": 3,
    "input": NIAH + "\nWhat are all the special magic numbers for a-b mentioned in the provided text? "
    "The special magic numbers for a-b mentioned in the provided text are",
    "outputs": ["1", "2"],
    "length": 99,
}
LONGBENCH_V2 = {
    "_id": "66",
    "domain": "Single-Document QA",
    "sub_domain": "Academic",
    "difficulty": "easy",
    "length": "short",
    "question": "What is it?",
    "choice_A": "one",
    "choice_B": "two",
    "choice_C": "three",
    "choice_D": "four",
    "answer": "B",
    "context": "It is two.",
}
NEEDLE = {"context": "Hay. Eat a sandwich. Hay.", "needle": "Eat a sandwich.", "retrieval_question": "What to eat?"}
TURN = {"input": "Key: a\nThe value is: ", "answer": "7f"}
CHOICE = {"input": "Who?", "answer": "me", "options": ["you", "me", "us", "them"]}
NUMBER = {"input": "You should answer with only one number. The second largest number of the list is: ", "answer": 42}
SCBENCH_LINES: dict[str, dict[str, Any]] = {
    "scbench_kv": {"id": 4, "context": '{"a": "7f"}', "multi_turns": [TURN, TURN | {"input": "b", "answer": "8f"}]},
    "scbench_prefix_suffix": {"context": "abc abd", "multi_turns": [TURN]},
    "scbench_vt": {"id": 1, "context": "VAR A = 1", "multi_turns": [TURN | {"answer": ["A", "B"]}]},
    "scbench_many_shot": {"id": 1, "context": "Q: 1", "task": "dates", "multi_turns": [TURN | {"answer": "C"}]},
    "scbench_mf": {"id": 1, "context": [4, 42, 43], "multi_turns": [NUMBER]},
    "scbench_choice_eng": {"id": 1, "context": "A book.", "multi_turns": [CHOICE]},
    "scbench_qa_eng": {"id": 1, "context": "A book.", "multi_turns": [{"input": "Who {x}?", "answer": "me"}]},
}
"""A line of each set of SCBench, with the fields of the published one."""
PREFIXQA = {"context": "A cat sat.", "questions": ["Who sat?", "What did it do?"], "answers": ["a cat", ["sat"]]}


PUBLISHED_PROMPTS = {
    "narrativeqa": "aada7ed24b06",
    "qasper": "0fbdd123fe7f",
    "multifieldqa_en": "20b4666a2de8",
    "hotpotqa": "9ec4ae308865",
    "2wikimqa": "9ec4ae308865",
    "musique": "9ec4ae308865",
    "gov_report": "91c25d585b18",
    "qmsum": "dca23b678fe0",
    "multi_news": "2af3f28c40b9",
    "trec": "0eff8bebdba9",
    "triviaqa": "00a802e6377e",
    "samsum": "a68d88423490",
    "passage_count": "986550b6c610",
    "passage_retrieval_en": "39b96b7fa52b",
    "lcc": "6a1f24cf0bb8",
    "repobench-p": "ee9ec182ea5f",
}
"""Beginnings of the SHA-256 hashes of the prompts in LongBench's file of prompts."""


def _read(tmp_path: Path, form: str, *records: dict[str, Any], name: str = "data") -> list[Context]:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return read_published(str(path), form)


def test_longbench_is_asked_as_published(tmp_path: Path) -> None:
    (context,) = _read(tmp_path, "longbench", LONGBENCH)
    (question,) = context.questions
    assert context.text + question.text == DATASETS["hotpotqa"].prompt.format(
        context=LONGBENCH["context"], input=LONGBENCH["input"]
    )
    assert (context.task, context.name, context.bare) == ("hotpotqa", "af1", False)
    assert (question.answers, question.metric, question.max_new_tokens) == (("a cat", "cat"), "f1", 32)


def test_longbenchs_prompts_are_the_published_ones_to_the_letter() -> None:
    hashes = {name: hashlib.sha256(one.prompt.encode()).hexdigest()[:12] for name, one in DATASETS.items()}
    assert hashes == PUBLISHED_PROMPTS


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_has_a_place_for_its_context_and_a_metric(tmp_path: Path, name: str) -> None:
    labels = ["Date", "Number"]
    (context,) = _read(tmp_path, "longbench", LONGBENCH | {"dataset": f"{name}_e", "all_classes": labels})
    assert context.task == name
    assert context.text.endswith("A cat sat here.")
    assert "{" not in context.text + context.questions[0].text
    assert context.questions[0].classes == ("Date", "Number")
    assert METRICS[context.questions[0].metric].score("A cat\n", context.questions[0]) >= 0


def test_rulers_prompt_is_cut_where_its_question_begins(tmp_path: Path) -> None:
    separate = {
        "input": NIAH + "\nWhat is the special magic number for a-b mentioned in the provided text?",
        "answer_prefix": " The special magic number for a-b mentioned in the provided text is",
    }
    whole, split = _read(tmp_path, "ruler", RULER, RULER | separate)
    (asked,) = whole.questions
    assert whole.text == NIAH
    assert asked.text.strip() == "What are all the special magic numbers for a-b mentioned in the provided text?"
    assert asked.prefix == "The special magic numbers for a-b mentioned in the provided text are"
    assert f"{whole.text}{asked.text}{asked.prefix}" == RULER["input"]
    assert (asked.answers, asked.metric, whole.name) == (("1", "2"), "match-all", "3")
    assert f"{split.text}{split.questions[0].text}{split.questions[0].prefix}" == "".join(separate.values())


@pytest.mark.parametrize(
    ("task", "metric", "question"),
    [
        (
            "vt",
            "match-all",
            "\nQuestion: Find all variables that are assigned the value 1 in the text above. Answer: So: ",
        ),
        (
            "cwe",
            "match-all",
            "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 are:",
        ),
        ("fwe", "match-all", "\nQuestion: Do not provide any explanation. What are the three words? Answer: They are:"),
        (
            "qa",
            "match-part",
            "\n\nAnswer the question based on the given documents. Only give me the answer.\n\nQuestion: Who? Answer:",
        ),
        (
            "qa",
            "match-part",
            "\n\nAnswer the question based on the given documents.\n\nQuestion: What are the names of the two? Answer:",
        ),
    ],
)
def test_rulers_other_tasks_after_an_example(tmp_path: Path, task: str, metric: str, question: str) -> None:
    """An example in the prompt has a question too; only the last one is asked."""
    example = f"An example.{question} one\n\nThe documents."
    (context,) = _read(tmp_path, "ruler", RULER | {"input": example + question, "answer_prefix": None})
    assert (context.task, context.text, context.questions[0].metric) == (task, example, metric)
    assert context.questions[0].prefix.startswith("Answer:")


def test_longbench_v2_is_a_choice(tmp_path: Path) -> None:
    (context,) = _read(tmp_path, "longbench-v2", LONGBENCH_V2)
    assert context.text.endswith("<text>\nIt is two.")
    assert "\n(B) two\n" in context.questions[0].text
    assert METRICS["choice"].score("The correct answer is (B)", context.questions[0]) == 1.0


def test_a_needle_knows_its_depth(tmp_path: Path) -> None:
    plain, exact = _read(tmp_path, "niah", NEEDLE, NEEDLE | {"answer": "sandwich"})
    assert plain.questions[0].depth == pytest.approx(5 / 25)
    assert (plain.questions[0].metric, exact.questions[0].metric) == ("f1", "match-part")
    assert exact.questions[0].answers == ("sandwich",)


def test_one_document_with_many_questions(tmp_path: Path) -> None:
    as_objects = {"context": "A cat sat.", "questions": [{"question": "Who sat?", "answer": "a cat"}]}
    both, objects = _read(tmp_path, "prefixqa", PREFIXQA, as_objects)
    assert [question.answers for question in both.questions] == [("a cat",), ("sat",)]
    assert objects.questions[0].text == both.questions[0].text


@pytest.mark.parametrize(
    ("name", "prompt", "answers", "metric"),
    [
        (
            "scbench_kv",
            "Extract the value corresponding to the specified key in the JSON object below.\n\n"
            '{"a": "7f"}\n\nKey: a\nThe value is: ',
            ("7f",),
            "substring",
        ),
        ("scbench_prefix_suffix", "abc abd\n\nKey: a\nThe value is: ", ("7f",), "substring"),
        ("scbench_vt", "VAR A = 1\n\nKey: a\nThe value is: ", ("A", "B"), "match-all"),
        ("scbench_many_shot", "Q: 1\n\nKey: a\nThe value is: ", ("C",), "match-part"),
        (
            "scbench_mf",
            f"{NUMBER['input']}\n\n[4, 42, 43]\n\nWhat is the second largest number of the list?\n\n{NUMBER['input']}",
            ("42",),
            "number",
        ),
        (
            "scbench_choice_eng",
            "Read the book and answer the question.\n\nA book.\n\nQuestion: Who?\nA. you\nB. me\nC. us\nD. them\n\n"
            "The the correct answer is",
            ("me", "B"),
            "option",
        ),
        (
            "scbench_qa_eng",
            "Read the book and answer the question. Be very concise in your answer.\n\nA book.\n\n"
            "Question: Who {x}?\nAnswer:",
            ("me",),
            "match-part",
        ),
    ],
)
def test_scbench_asks_and_scores_as_its_code_does(
    tmp_path: Path, name: str, prompt: str, answers: tuple[str, ...], metric: str
) -> None:
    """The file's name is the set's; a field `dataset` does as well."""
    line = SCBENCH_LINES[name]
    (context,) = _read(tmp_path, "scbench", line, name=name)
    assert _read(tmp_path, "scbench", line | {"dataset": name}) == [context]
    assert (context.task, context.name) == (name, str(line.get("id", "line 1")))
    assert len(context.questions) == len(line["multi_turns"])
    asked = context.questions[0]
    assert (context.text + asked.text, asked.answers, asked.metric) == (prompt, answers, metric)
    assert METRICS[metric].score(", ".join(answers), asked) == 1
    assert METRICS[metric].score("wrong", asked) == 0


def _turn(**changes: Any) -> dict[str, Any]:
    return SCBENCH_LINES["scbench_kv"] | {"multi_turns": [TURN, changes]}


@pytest.mark.parametrize(
    ("name", "record", "says"),
    [
        ("data", _turn(**TURN), "line 1: data is none of SCBench's sets, scbench_kv, .*; name the file after its set"),
        ("scbench_repoqa", _turn(**TURN), "line 1: scbench_repoqa is not read, because .*parsers.*; give one of"),
        ("scbench_summary", _turn(**TURN), "line 1: scbench_summary is not read, because eval has no ROUGE-Lsum"),
        ("scbench_kv", {"context": "?"}, "line 1: no field 'multi_turns'; there are: context$"),
        ("scbench_kv", _turn(input="?"), "line 1, turn 2: no field 'answer'; there are: input$"),
        ("scbench_kv", _turn(input="?", answer=[]), "line 1, turn 2: a question has no answer$"),
        ("scbench_kv", _turn(input="?", answer={"a": "b"}), "line 1, turn 2: an answer is a JSON object; give a text"),
        ("scbench_kv", _turn(input="?", answer=["a", ["b"]]), "line 1, turn 2: an answer is a JSON list; give a text"),
        *(
            ("scbench_kv", _turn(input=text, answer="?"), "line 1, turn 2: the input is empty or not a text; give")
            for text in ("", " \n", None, {"a": "b"})
        ),
        ("scbench_kv", {"context": " ", "multi_turns": [TURN]}, "line 1: context or multi_turns is empty; give a text"),
        ("scbench_kv", {"context": "?", "multi_turns": []}, "line 1: context or multi_turns is empty; give a text"),
        ("scbench_kv", {"context": "", "multi_turns": [TURN]}, "line 1: context or multi_turns is empty; give a text"),
        ("scbench_kv", {"context": None, "multi_turns": [TURN]}, "line 1: a field has another type than the format"),
        ("scbench_kv", {"context": "?", "multi_turns": TURN}, "line 1: a field has another type than the format"),
        ("scbench_kv", {"context": "?", "multi_turns": ["?"]}, "line 1, turn 1: a field has another type than"),
        ("scbench_choice_eng", _turn(**TURN), "line 1, turn 1: no field 'options'; there are: input, answer$"),
        (
            "scbench_choice_eng",
            {"context": "?", "multi_turns": [CHOICE | {"answer": "he"}]},
            "line 1, turn 1: give four options, of which one is the answer$",
        ),
        (
            "scbench_choice_eng",
            {"context": "?", "multi_turns": [CHOICE | {"options": "abcd", "answer": "a"}]},
            "line 1, turn 1: a field has another type than the format requires",
        ),
        (
            "scbench_mf",
            {"context": [1], "multi_turns": [NUMBER | {"answer": "many"}]},
            "line 1, turn 1: give an input with words such as .*, and a number as its answer$",
        ),
        (
            "scbench_mf",
            {"context": [1], "multi_turns": [NUMBER | {"input": "?"}]},
            "line 1, turn 1: give an input with words such as .*, and a number as its answer$",
        ),
    ],
)
def test_lines_that_are_not_scbenchs_are_refused(tmp_path: Path, name: str, record: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=f"--data .*{name}.jsonl --format scbench, {says}"):
        _read(tmp_path, "scbench", record, name=name)


@pytest.mark.parametrize(
    ("form", "record", "says"),
    [
        ("longbench", LONGBENCH | {"dataset": "dureader"}, r"line 1: dataset dureader has no English metric"),
        ("longbench", {"input": "?"}, r"line 1: no field 'dataset'; there are: input"),
        ("longbench", LONGBENCH | {"answers": []}, r"line 1: a question has no answer"),
        ("longbench", LONGBENCH | {"answers": [{"text": "?"}]}, r"line 1: an answer is a JSON object; give a text"),
        ("longbench", LONGBENCH | {"answers": ["", None, " "]}, r"line 1: a question has no answer"),
        ("longbench", LONGBENCH | {"answers": [[]]}, r"line 1: an answer is a JSON list; give a text"),
        ("longbench", LONGBENCH | {"answers": [{}, "a"]}, r"line 1: an answer is a JSON object; give a text"),
        ("longbench", LONGBENCH | {"answers": [True]}, r"line 1: an answer is a JSON boolean; give a text"),
        ("longbench", LONGBENCH | {"answers": [math.nan]}, r"line 1: give one JSON object per line"),
        ("longbench", LONGBENCH | {"input": None}, r"line 1: the field 'input' is a JSON null; give a text"),
        ("longbench", LONGBENCH | {"context": []}, r"line 1: the field 'context' is a JSON list; give a text"),
        ("longbench", LONGBENCH | {"dataset": "trec"}, r"line 1: trec needs the labels of its classes; give them"),
        ("longbench-v2", LONGBENCH_V2 | {"choice_A": None}, r"line 1: the field 'choice_A' is a JSON null; give"),
        ("longbench-v2", LONGBENCH_V2 | {"answer": "two"}, r"line 1: the answer 'two' is not the letter of a choice"),
        ("ruler", RULER | {"answer_prefix": ["So"]}, r"line 1: the field 'answer_prefix' is a JSON list; give a text"),
        ("ruler", RULER | {"input": "Hello."}, r"line 1: the input does not end with a question"),
        ("niah", NEEDLE | {"needle": "Gold."}, r"line 1: the needle is not in the context"),
        ("niah", NEEDLE | {"needle": None}, r"line 1: the field 'needle' is a JSON null; give a text"),
        ("prefixqa", PREFIXQA | {"answers": ["one"]}, r"line 1: 2 questions and 1 answers"),
        ("prefixqa", PREFIXQA | {"questions": []}, r"line 1: no questions"),
        ("prefixqa", PREFIXQA | {"questions": 5}, r"line 1: a field has another type than the format requires"),
        ("prefixqa", PREFIXQA | {"answers": None}, r"line 1: a field has another type than the format requires"),
        ("prefixqa", PREFIXQA | {"answers": "me"}, r"line 1: a field has another type than the format requires"),
        ("prefixqa", PREFIXQA | {"questions": "ab"}, r"line 1: a field has another type than the format requires"),
        ("prefixqa", PREFIXQA | {"questions": [None, "?"]}, r"line 1: the question is empty"),
        ("prefixqa", PREFIXQA | {"questions": [["?"], "?"]}, r"line 1: the question is a JSON list; give a text"),
        ("prefixqa", PREFIXQA | {"answers": [",", "a"]}, r"line 1: F1 counts neither punctuation nor articles"),
        ("niah", NEEDLE | {"needle": "", "context": ""}, r"line 1: the needle is not in the context"),
        ("squad", LONGBENCH, r"--format squad: choose one of longbench, ruler"),
    ],
)
def test_what_is_of_another_form_is_refused(tmp_path: Path, form: str, record: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        _read(tmp_path, form, record)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"[1]\n", "line 1: give one JSON object per line"),
        (b"[]\n", "line 1: give one JSON object per line"),
        (b'{"context": "\\ud83d"}\n', "line 1: the line has half of a UTF-16 surrogate pair"),
        (b'{"a": 1}\n{', "line 2|line 1"),
        (b"\xff", "not text in UTF-8"),
    ],
)
def test_a_file_that_is_no_jsonl_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    for read in (read_pairs, lambda file: read_published(file, "ruler")):
        with pytest.raises(UsageError, match=says):
            read(str(path))


def test_pairs_have_one_answer_or_several(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"question": "Who?", "answer": "me"}\n{"question": "What?", "answers": ["a", "b"]}\n')
    assert read_pairs(str(path)) == (("Who?", ("me",)), ("What?", ("a", "b")))


def test_a_long_document_loses_its_middle() -> None:
    text = " ".join(map(str, range(1000)))
    short = shorten(text, count_words, 100)
    assert 90 <= count_words(short) <= 100
    assert text.startswith(short[:100])
    assert text.endswith(short[-100:])
    assert shorten(text, count_words, 1000) == text


@pytest.mark.parametrize("question", [None, "", " "])
def test_pairs_without_a_question_are_refused(tmp_path: Path, question: str | None) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"question": question, "answer": "me"}))
    with pytest.raises(UsageError, match=r"line 1: the question is empty"):
        read_pairs(str(path))


def test_the_field_that_pairs_lack_has_its_name_in_the_help(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"question": "Who?", "reply": "me"}')
    with pytest.raises(UsageError, match=r"line 1: no field 'answers'; there are: question, reply$"):
        read_pairs(str(path))


@pytest.mark.parametrize("answers", [[[]], [{}, "me"], {}, [False], [math.inf]])
def test_pairs_whose_answers_are_no_texts_are_refused(tmp_path: Path, answers: Any) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"question": "Who?", "answers": answers}))
    with pytest.raises(UsageError, match=r"line 1: (an answer is a JSON|give one JSON object)"):
        read_pairs(str(path))


def test_a_context_without_a_name_has_the_name_of_its_line(tmp_path: Path) -> None:
    (context,) = _read(tmp_path, "longbench", LONGBENCH | {"_id": None})
    assert context.name == "line 1"


def test_empty_answers_beside_others_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"question": "Who?", "answers": ["", "me", null]}')
    assert read_pairs(str(path)) == (("Who?", ("me",)),)


def test_pairs_whose_answers_f1_does_not_see_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"question": "Who?", "answer": "me"}\n{"question": "What separates?", "answers": [",", "the"]}\n')
    with pytest.raises(UsageError, match=r"line 2: F1 counts neither punctuation nor articles.*answer ','"):
        read_pairs(str(path))
