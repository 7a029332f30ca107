"""Tasks on given texts: published benchmarks, the user's own questions, perplexity and long answers."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sparsekv.formats.documents.document import decode_text, read_bytes
from sparsekv.formats.errors import SparsekvError, UsageError, check_choice
from sparsekv.runtime.tasks.haystack import depth_of, fill, largest
from sparsekv.runtime.tasks.interface import Context, CountTokens, DrawnTask, Question, Request, Task, tasks
from sparsekv.runtime.tasks.metrics import normalise

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)


@dataclass(frozen=True)
class Dataset:
    """A published dataset: a prompt with placeholders such as {context} and {input}, and the metric of answers.

    `max_new_tokens` is the largest number of tokens of an answer. With `bare`, no chat template is used, because the
    prompt ends with few-shot examples or code to continue.
    """

    prompt: str
    max_new_tokens: int
    metric: str
    bare: bool = False


DATASETS = {
    "narrativeqa": Dataset(
        # The published prompt has no space in "asconcisely".
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
        "Story: {context}\n\nNow, answer the question based on the story asconcisely as you can, using a single phrase "
        "if possible. Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        "f1",
    ),
    "qasper": Dataset(
        "You are given a scientific article and a question. Answer the question "
        + _ARTICLE
        + "Article: {context}\n\n Answer the question based on the above article "
        + _ARTICLE
        + "Question: {input}\n\nAnswer:",
        128,
        "f1",
    ),
    "multifieldqa_en": Dataset(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "f1",
    ),
    "hotpotqa": Dataset(_PASSAGES, 32, "f1"),
    "2wikimqa": Dataset(_PASSAGES, 32, "f1"),
    "musique": Dataset(_PASSAGES, 32, "f1"),
    "gov_report": Dataset(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge-l",
    ),
    "qmsum": Dataset(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge-l",
    ),
    "multi_news": Dataset(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge-l",
    ),
    "trec": Dataset(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "classification",
        bare=True,
    ),
    "triviaqa": Dataset(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        "f1-first-line",
        bare=True,
    ),
    "samsum": Dataset(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "rouge-l-first-line",
        bare=True,
    ),
    "passage_count": Dataset(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully "
        "read these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": Dataset(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        32,
        "retrieval",
    ),
    "lcc": Dataset(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "code-similarity", bare=True
    ),
    "repobench-p": Dataset(
        "Please complete the code given below. \n{context}{input}Next line of code:\n", 64, "code-similarity", bare=True
    ),
}

INSTRUCTION = (
    "Answer the question based on the given document. Only give me the answer and do not output any other words."
)
ANSWER_TOKENS = 32
CONTINUATION_TOKENS = 64


def ask(question: str, answers: tuple[str, ...], text: str, metric: str = "f1") -> Question:
    """Create a question about the document `text`.

    The question's depth is the position of the first of the expected answers that is in the text; None if none is.
    """
    found = next((answer for answer in answers if answer and answer in text), None)
    return Question(
        text=f"{INSTRUCTION}\n\nQuestion: {question}",
        prefix="Answer:",
        answers=answers,
        metric=metric,
        max_new_tokens=ANSWER_TOKENS,
        depth=None if found is None else depth_of(text, found),
    )


class QuestionAnswering(Task):
    """Asks many questions about one context. The context is the beginning of the text (PreFixQA, arXiv 2411.09688).

    A question is left out if its answers occur literally in the text, but only after the end of the context.
    """

    options = ("--pairs",)
    unread = ("--contexts",)

    def make(self, request: Request) -> list[Context]:
        if not request.pairs:
            raise UsageError("--task qa needs questions with answers: give --pairs FILE.jsonl")
        pieces = re.findall(r"\S+\s*", request.text)
        try:
            pieces = fill(pieces, "".join, request.count, request.length, "qa")
        except UsageError:
            if request.count(request.text) > request.length:
                raise
        text = "".join(pieces).rstrip()
        asked = [
            ask(question, answers, text) for question, answers in request.pairs if not _cut_off(answers, text, request)
        ]
        if not asked:
            raise UsageError(f"no answer of --pairs is in the first {request.length} tokens; give a larger --length")
        return [Context("qa", f"{request.length} tokens", text, tuple(asked[: request.questions]), request.length)]


def _cut_off(answers: tuple[str, ...], text: str, request: Request) -> bool:
    """Whether answers occur in the request's text, and none of them in its beginning `text`."""
    return any(answer in request.text for answer in answers) and not any(answer in text for answer in answers)


COUNTED = 10
"""A text is tokenized as a whole to count its tokens if it has at most this many times the context's characters."""


def cut_note(context: Context, request: Request, name: str) -> str | None:
    """Return a line about the end of the text that a context of `qa` lacks; None if the context is the whole text.

    The tokens of a very long text are estimated from its characters. `name` is the text's name.
    """
    whole, text = request.text.strip(), context.text
    if len(text) >= len(whole):
        return None
    tokens = request.count(text)
    if len(whole) <= COUNTED * len(text):
        of = f"{request.count(whole):,}"
    else:
        of = f"about {float(f'{tokens * len(whole) / len(text):.2g}'):,.0f}"
    lost = sum(_cut_off(answers, text, request) for _, answers in request.pairs)
    has, are = ("has its answer", "is") if lost == 1 else ("have their answers", "are")
    left = f"; {lost:,} of {len(request.pairs):,} questions {has} only after them and {are} left out" if lost else ""
    return f"--task qa asks about the first {tokens:,} of {of} tokens of {name}{left}; a larger --length takes more"


def _window(request: Request, number: int, task: str) -> tuple[str, str]:
    """Cut window `number`, counted from 0, out of a text; return it, and up to CONTINUATION_TOKENS words after it.

    Raises:
        UsageError: the text is too short.
    """
    pieces = re.findall(r"\s*\S+", request.text)
    drawn = random.Random(f"{request.seed} {task} {request.length} {number}")
    # A word has at least one token, so windows up to this start have enough words to fill their length.
    last = max(1, len(pieces) - request.length - CONTINUATION_TOKENS)
    part = last / request.contexts
    start = int(number * part + drawn.random() * part)
    window = fill(pieces[start:], _joined, request.count, request.length, task)
    return _joined(window), "".join(pieces[start + len(window) :][:CONTINUATION_TOKENS])


class Continuation(DrawnTask):
    """Cuts windows out of the text. The score of a window is the perplexity of the words that follow the window."""

    unread = ("--questions", "--max-new-tokens", "--batch-size", "--raw")

    def draw(self, request: Request, number: int) -> Context:
        window, rest = _window(request, number, "perplexity")
        if not rest:
            raise UsageError(
                "--task perplexity needs text after the context, and there is none; give a longer text or a "
                "smaller --length"
            )
        question = Question("", (rest,), "perplexity", CONTINUATION_TOKENS)
        return Context(
            "perplexity", f"{request.length} tokens, {number}", window, (question,), request.length, bare=True
        )


OPEN_REQUESTS = (
    "Summarise the text above in several paragraphs.",
    "Explain the text above to a beginner, step by step.",
    "Write ten questions that the text above answers, each with its answer.",
    "List all names and terms of the text above, each with an explanation.",
    "Write a detailed review of the text above, with its strengths and weaknesses.",
)
LONG_ANSWER_TOKENS = 300


class LongAnswer(DrawnTask):
    """Cuts windows out of the text, and asks for long answers about each window.

    Each answer is compared with the answer of dense attention.
    """

    def draw(self, request: Request, number: int) -> Context:
        if request.asked() > len(OPEN_REQUESTS):
            raise UsageError(
                f"--questions {request.asked()}: long-answer has {len(OPEN_REQUESTS)} at most per context; give fewer"
            )
        window, _ = _window(request, number, "long-answer")
        questions = [Question(one, (), "same-start", LONG_ANSWER_TOKENS) for one in OPEN_REQUESTS[: request.asked()]]
        name = f"{request.length} tokens, {number}"
        return Context("long-answer", name, window, tuple(questions), request.length)


def _joined(pieces: list[str]) -> str:
    return "".join(pieces).lstrip()


tasks.add("qa", QuestionAnswering())
tasks.add("perplexity", Continuation())
tasks.add("long-answer", LongAnswer())

Record = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """A line of the file of published data that `--data` names. Lines are counted from 1."""

    file: str
    form: str
    number: int

    def __str__(self) -> str:
        return f"line {self.number}"

    @property
    def where(self) -> str:
        """The beginning of an error message about the line."""
        return f"--data {self.file} --format {self.form}, {self}"


RULER_ENDS = (
    ("\n\nAnswer the question based on the given documents.", "match-part", 32, "qa", " Answer:"),
    ("\nQuestion: Find all variables", "match-all", 30, "vt", " Answer:"),
    ("\nQuestion: Do not provide any explanation.", "match-all", 50, "fwe", " Answer:"),
    ("\nQuestion: What are the 10 most common words", "match-all", 120, "cwe", " Answer:"),
    ("\nWhat are all the special magic", "match-all", 128, "niah", " The special magic"),
    ("\nWhat is the special magic", "match-all", 128, "niah", " The special magic"),
)
"""For each RULER task: start of the question, metric, maximum number of answer tokens, name, start of the answer."""

CHOICES = (
    "What is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n(B) {choice_B}\n"
    "(C) {choice_C}\n(D) {choice_D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)


def read_published(file: str, form: str) -> list[Context]:
    """Read the contexts of a jsonl file, one per line.

    Only contexts in the formats `prefixqa` and `scbench` can have several questions.

    Raises:
        UsageError: the format is unknown, the file is unreadable or empty, or a line does not have the format.
    """
    check_choice("--format", form, FORMATS)
    return [_read(record, Line(file, form, number)) for number, record in _lines(file)]


def read_pairs(file: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Read questions and their answers, one JSON object per line with `question`, and `answers` or `answer`.

    Raises:
        UsageError: the file is unreadable or empty, a line is not in this format, or F1 cannot score its answers.
    """
    option = "--pairs"
    return tuple(_guarded(_pair, record, f"{option} {file}, line {number}") for number, record in _lines(file, option))


def shorten(text: str, count: CountTokens, limit: int) -> str:
    """Cut the middle out of a text that has more than `limit` tokens, as in LongBench."""
    if count(text) <= limit:
        return text

    def halves(kept: int) -> str:
        return text[: kept // 2] + text[len(text) - kept // 2 :]

    # The number of tokens is not exactly monotone in the cut, because a cut changes the tokens beside it.
    # Bisection is close enough.
    return halves(max(0, largest(lambda kept: count(halves(kept)) <= limit, len(text))))


def _lines(file: str, option: str = "--data") -> list[tuple[int, Record]]:
    try:
        text = decode_text(read_bytes(file, option=option), f"{option} {file}")
    except SparsekvError as error:
        raise UsageError(str(error)) from None
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line, parse_constant=_refuse_constant)
                if not isinstance(record, dict):
                    raise TypeError
                json.dumps(record, ensure_ascii=False).encode()  # a lone surrogate, such as \ud83d, cannot be encoded
                found.append((number, record))
            except UnicodeEncodeError:
                raise UsageError(
                    f"{option} {file}, line {number}: the line has half of a UTF-16 surrogate pair, such as \\ud83d "
                    "alone; write the whole character"
                ) from None
            except (ValueError, TypeError, RecursionError):
                raise UsageError(f"{option} {file}, line {number}: give one JSON object per line") from None
    if not found:
        raise UsageError(f"{option} {file} is empty; give one JSON object per line")
    return found


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and infinite numbers, which JSON does not have."""
    raise ValueError(name)


def _read(record: Record, line: Line) -> Context:
    return _guarded(lambda one: FORMATS[line.form](one, line), record, line.where)


def _guarded(reader: Callable[[Record], T], record: Record, where: str) -> T:
    try:
        return reader(record)
    except KeyError as error:
        raise UsageError(f"{where}: no field {error}; there are: {', '.join(record)}") from None
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    except TypeError:
        why = "a field has another type than the format requires, such as a number instead of a list"
        raise UsageError(f"{where}: {why}") from None


_KINDS = {dict: "object", list: "list", bool: "boolean", type(None): "null"}
"""JSON's names of the types of values that are neither texts nor numbers."""


def _text(value: Any, what: str) -> str:
    """Return a text or a number as a string; raise ValueError, which begins with `what`, for another JSON type."""
    if type(value) in _KINDS:
        raise ValueError(f"{what} is a JSON {_KINDS[type(value)]}; give a text")
    return str(value)


def _field(record: Record, name: str) -> str:
    """Return a field's text. Raises ValueError for another JSON type, and KeyError if there is no such field."""
    return _text(record[name], f"the field '{name}'")


def _name(record: Record, field: str, line: Line) -> str:
    """Return the name of a context: the field's value, or else the number of the line."""
    value = record.get(field)
    return str(line if value is None else value)


def _strings(value: Any) -> tuple[str, ...]:
    """Return the answers as strings. Empty answers are left out, because every text contains an empty string.

    Raises ValueError if no answer is left, or if an answer is a JSON object, list or boolean.
    """
    given = value if isinstance(value, list) else [value]
    values = tuple(text for one in given if one is not None and (text := _text(one, "an answer")).strip())
    if not values:
        raise ValueError("a question has no answer")
    return values


def _pair(record: Record) -> tuple[str, tuple[str, ...]]:
    """Return a question, from the field `question`, and its answers, from `answers` or `answer`.

    Raises the errors of `_asked`.
    """
    alone = "answer" in record and "answers" not in record
    return _asked(record["question"], record["answer" if alone else "answers"])


def _asked(question: Any, answers: Any) -> tuple[str, tuple[str, ...]]:
    """Return the texts of a question and of its answers.

    Raises ValueError if one of them is empty or not a text, or if the answers have only punctuation and articles. F1
    ignores these, so no answer of a model could match.
    """
    if question is None or not str(question).strip():
        raise ValueError("the question is empty")
    expected = _strings(answers)
    if not any(normalise(one) for one in expected):
        raise ValueError(f"F1 counts neither punctuation nor articles, which is all of the answer {expected[0]!r}")
    return _text(question, "the question"), expected


def _longbench(record: Record, line: Line) -> Context:
    dataset = _field(record, "dataset").removesuffix("_e")
    if dataset not in DATASETS:
        raise ValueError(f"dataset {dataset} has no English metric here; there are: {', '.join(DATASETS)}")
    known = DATASETS[dataset]
    head, tail = known.prompt.split("{context}")
    labels = record.get("all_classes")
    if known.metric == "classification" and not labels:
        raise ValueError(f"{dataset} needs the labels of its classes; give them as a list in the field 'all_classes'")
    question = Question(
        text=tail.replace("{input}", _field(record, "input")),
        answers=_strings(record["answers"]),
        metric=known.metric,
        max_new_tokens=known.max_new_tokens,
        classes=_strings(labels) if labels else (),
    )
    text = head + _field(record, "context")
    return Context(dataset, _name(record, "_id", line), text, (question,), bare=known.bare)


def _ruler(record: Record, line: Line) -> Context:
    text = _field(record, "input")
    ends = [(text.rfind(end[0]), end) for end in RULER_ENDS if end[0] in text]
    if not ends:
        raise ValueError("the input does not end with a question of RULER's tasks")
    # The last match counts, because a prompt with an example also has a question before the context.
    at, (_, metric, longest, task, begins) = max(ends)
    asked, prefix = text[at:], _text(record.get("answer_prefix") or "", "the field 'answer_prefix'").strip()
    if not prefix and begins in asked:
        asked, prefix = asked[: asked.rindex(begins)], asked[asked.rindex(begins) :].strip()
    question = Question(f"{asked} " if prefix else asked, _strings(record["outputs"]), metric, longest, prefix)
    return Context(task, _name(record, "index", line), text[:at], (question,))


def _longbench_v2(record: Record, line: Line) -> Context:
    head = "Please read the following text and answer the question below.\n\n<text>\n"
    fields = ("question", "choice_A", "choice_B", "choice_C", "choice_D")
    filled = CHOICES.format(**{field: _field(record, field).strip() for field in fields})
    answers = _strings(record["answer"])
    if not {*answers} <= {*"ABCD"}:
        raise ValueError(f"the answer {answers[0]!r} is not the letter of a choice; give A, B, C or D")
    question = Question(f"\n</text>\n\n{filled}", answers, "choice", 128)
    task = f"longbench-v2 {record['domain']}" if "domain" in record else "longbench-v2"
    return Context(task, _name(record, "_id", line), head + _field(record, "context").strip(), (question,))


def _niah(record: Record, line: Line) -> Context:
    """Read a haystack with its needle. Without the field `answer`, the score is F1 with the needle's words.

    Raises ValueError if the needle is not in the context.
    """
    text, needle = _field(record, "context"), _field(record, "needle").strip()
    if not needle or needle not in text:
        raise ValueError("the needle is not in the context")
    asked = _field(record, "retrieval_question" if "retrieval_question" in record else "question")
    exact = "answer" in record
    question = Question(
        text=f"\n\n{asked} Don't give information outside the document or repeat your findings",
        answers=_strings(record["answer"]) if exact else (needle,),
        metric="match-part" if exact else "f1",
        max_new_tokens=64,
        depth=text.index(needle) / len(text),
        needle=needle,
    )
    return Context("niah", _name(record, "index", line), text, (question,))


def _prefixqa(record: Record, line: Line) -> Context:
    text, asked = _field(record, "context"), record["questions"]
    if not isinstance(asked, list):
        raise TypeError
    if all(isinstance(one, dict) for one in asked):
        pairs = [_pair(one) for one in asked]
    else:
        answers = record["answers"]
        if not isinstance(answers, list):
            raise TypeError
        if len(answers) != len(asked):
            raise ValueError(f"{len(asked)} questions and {len(answers)} answers")
        pairs = [_asked(question, answer) for question, answer in zip(asked, answers, strict=True)]
    if not pairs:
        raise ValueError("no questions")
    questions = [ask(question, answers, text) for question, answers in pairs]
    return Context("prefixqa", _name(record, "id", line), text, tuple(questions))


SCBENCH = {
    "scbench_kv": Dataset(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
        150,
        "substring",
    ),
    "scbench_prefix_suffix": Dataset("{context}\n\n{input}", 150, "substring"),
    "scbench_vt": Dataset("{context}\n\n{input}", 30, "match-all"),
    "scbench_many_shot": Dataset("{context}\n\n{input}", 10, "match-part"),
    "scbench_mf": Dataset("{first}\n\n{context}\n\nWhat is {target}?\n\n{input}", 5, "number"),
    "scbench_choice_eng": Dataset(
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\n"
        "The the correct answer is",
        40,
        "option",
    ),
    "scbench_qa_eng": Dataset(
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
        "Question: {input}\nAnswer:",
        40,
        "match-part",
    ),
}
"""SCBench's sets, with the prompts and metrics of SCBench's code. Beside `input` and `context`, a prompt may have
placeholders for the first request (`first`), the number that a request asks for (`target`), and the options of a
choice (`A` to `D`)."""

REPOQA = "its answers are functions, which are compared by parsers of six programming languages"
UNREAD = {
    "scbench_repoqa": REPOQA,
    "scbench_repoqa_and_kv": REPOQA,
    "scbench_qa_chn": "eval has no Chinese metric",
    "scbench_summary": "eval has no ROUGE-Lsum",
    "scbench_summary_with_needles": "eval has no ROUGE-Lsum",
}
"""SCBench's sets that are not read, with the reasons."""


def _scbench(record: Record, line: Line) -> Context:
    """Read a context with its requests. The field `dataset`, or else the file's name, is the name of the set.

    Raises ValueError if the set is not read here or a field is empty, TypeError if a field has another type, and
    UsageError if a turn cannot be read.
    """
    name = str(record.get("dataset", Path(line.file).stem))
    if name in UNREAD:
        raise ValueError(f"{name} is not read, because {UNREAD[name]}; give one of {', '.join(SCBENCH)}")
    if name not in SCBENCH:
        raise ValueError(
            f"{name} is none of SCBench's sets, {', '.join(SCBENCH)}; name the file after its set, such as "
            "scbench_kv.jsonl, or give each line the set's name in a field 'dataset'"
        )
    known, text, turns = SCBENCH[name], record["context"], record["multi_turns"]
    if not isinstance(text, str | list) or not isinstance(turns, list):
        raise TypeError
    if not str(text).strip() or text == [] or not turns:
        raise ValueError("context or multi_turns is empty; give a text, and at least one turn with input and answer")
    read = [
        _guarded(lambda one: _scbench_turn(one, known.prompt), turn, f"{line.where}, turn {number}")
        for number, turn in enumerate(turns, 1)
    ]
    head, tail = known.prompt.split("{context}")
    questions = [
        Question(tail.format(**fields), answers, known.metric, known.max_new_tokens) for fields, answers in read
    ]
    document = head.format(first=read[0][0]["input"]) + str(text)
    return Context(name, _name(record, "id", line), document, tuple(questions))


def _scbench_turn(turn: Record, prompt: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the texts of a request that fill the placeholders of a prompt, and the request's answers.

    Raises ValueError if a field does not have the values that the placeholders need.
    """
    if not isinstance(turn["input"], str) or not turn["input"].strip():
        raise ValueError("the input is empty or not a text; give the words of the request")
    fields, answers = {"input": turn["input"]}, _strings(turn["answer"])
    if "{A}" in prompt:
        if not isinstance(turn["options"], list):
            raise TypeError
        options = [_text(one, "an option") for one in turn["options"]]
        if len(options) != 4 or answers[0] not in options:
            raise ValueError("give four options, of which one is the answer")
        fields |= dict(zip("ABCD", options, strict=True))
        answers = (answers[0], "ABCD"[options.index(answers[0])])
    if "{target}" in prompt:
        target = re.search("The .+ is", fields["input"])
        if target is None or not re.fullmatch(r"\d+(\.\d+)?", answers[0]):
            raise ValueError("give an input with words such as 'The largest number is', and a number as its answer")
        fields["target"] = target[0].lower().removesuffix(" is")
    return fields, answers


FORMATS: dict[str, Callable[[Record, Line], Context]] = {
    "longbench": _longbench,
    "ruler": _ruler,
    "longbench-v2": _longbench_v2,
    "niah": _niah,
    "prefixqa": _prefixqa,
    "scbench": _scbench,
}
