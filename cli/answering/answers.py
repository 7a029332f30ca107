"""Answers to all questions of a call, one after another or as a batch, with compiled decode steps where they pay."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from sparsekv.cli.answering.options import AT_ONCE
from sparsekv.cli.common.console import note, note_plain
from sparsekv.cli.common.questions import read_lines, read_question
from sparsekv.formats.documents.plain_text import encode_text
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.runtime.decoding.batch import Batch, why_alone
from sparsekv.runtime.decoding.compiled import compile_steps, worth_compiling
from sparsekv.runtime.decoding.generate import NO_ANSWER, Answer, Sampling, answer_room, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.decoding.step import one_step


def questions_asked(prompt: str | None, prompt_file: str | None, batch_file: str | None) -> list[str]:
    """The question, or each line of a batch.

    Raises:
        UsageError: both are given, or a file cannot be read.
    """
    if batch_file is None:
        return [read_question(prompt, prompt_file)]
    if prompt is not None or prompt_file is not None:
        one = "a question" if prompt_file is None else "--prompt-file"
        raise UsageError(f"--batch-file and {one} exclude each other: give one of them")
    return read_lines(batch_file, "--batch-file")


def encode_questions(
    index: OpenIndex, questions: Sequence[str], batch_file: str | None, *, raw: bool, special_tokens: bool
) -> list[torch.Tensor | None]:
    """Token ids [Q] of each question; None for a blank line of a batch.

    Args:
        batch_file: the file whose lines these are, named in errors; None for a single question from elsewhere.

    Raises:
        UsageError: a question is empty, or too long for the model.
    """
    return [
        None
        if batch_file is not None and not question.strip()
        else _encode(index, question, where, raw=raw, special_tokens=special_tokens)
        for question, where in zip(questions, _places(len(questions), batch_file), strict=True)
    ]


def note_plain_questions(
    index: OpenIndex, questions: Sequence[str], batch_file: str | None, *, special_tokens: bool, quiet: bool
) -> None:
    """Note the special tokens of the model that questions contain and that were read as plain text."""
    if quiet or special_tokens:
        return
    found = Counter[str]()
    for question in questions:
        found.update(encode_text(index.tokenizer, question).plain)
    name = "standard input" if batch_file == "-" else batch_file
    note_plain("the question" if name is None else f"the text of {name}", found, quiet=quiet)


def _places(lines: int, batch_file: str | None) -> list[str]:
    name = "standard input" if batch_file == "-" else batch_file
    return ["" if name is None else f"{name} line {line}: " for line in range(1, lines + 1)]


def _encode(index: OpenIndex, question: str, where: str, *, raw: bool, special_tokens: bool) -> torch.Tensor:
    try:
        ids = question_ids(index, question, raw=raw, special_tokens=special_tokens)
        answer_room(index, len(index.input_ids) + len(ids))
    except UsageError as error:
        raise UsageError(f"{where}{error}") from None
    return ids


def compile_for(asker: Session, batch: Batch | None, mode: str, tokens: int, *, alone: bool, quiet: bool) -> None:
    """Compile, as `--compile` says, for the steps that so many tokens of all answers take; `batch` decodes them, if
    several do together.

    Args:
        alone: no other rank takes these steps too.

    Raises:
        SparsekvError: the layers cannot be compiled here, and the mode is `on`, or other ranks wait in the step that
            this one cannot take; else a note says so.
    """
    model, slots = asker.index.model, 1 if batch is None else batch.slots
    if not worth_compiling(mode, model.device, tokens // slots):
        return
    try:
        if batch is None:
            seconds = compile_steps(model, partial(one_step, model, asker.cache, asker.index.input_ids[-1:]))
        else:
            seconds = compile_steps(model, batch.one_step, tokens=batch.shared.size_of(slots))
        note(f"compiled in {seconds:.1f} s", quiet=quiet)
    except SparsekvError as error:
        if mode == "on" or not alone:
            raise
        note(f"not compiled: {error}", quiet=quiet)


QUESTION_ROWS = 256  # a guess of how many tokens a question has, with its chat template
SHARE_OF_FREE = 0.25
"""Of a GPU's free memory: what auto gives to the questions' own rows, whose buffers double as they grow."""


def parse_batch_size(text: str, batch_file: str | None, alone: str) -> int | None:
    """A `--batch-size`; None for auto.

    Args:
        alone: the option for which each question is answered alone, empty without one.

    Raises:
        UsageError: it is neither auto nor a number of at least 1, or means nothing with the other options.
    """
    if text == "auto":
        return None
    if batch_file is None:
        raise UsageError(f"--batch-size {text}: is for the questions of a --batch-file; leave it out")
    if alone and text != "1":
        raise UsageError(f"--batch-size {text}: {alone} is of one question at a time; give --batch-size 1")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"--batch-size {text}: give auto, or a whole number of at least 1")
    return int(text)


def choose_batch_size(asked: int | None, asker: Session, questions: int, answer_tokens: int) -> int:
    """How many questions to answer at once, for answers of so many tokens.

    Raises:
        UsageError: more than one was asked for, and the config allows one.
    """
    alone = why_alone(asker.index, asker.config.attention, asker.cache)
    if asked is None:
        return 1 if alone else max(1, min(_fitting(asker, answer_tokens), questions))
    if asked > 1 and alone:
        raise UsageError(f"--batch-size {asked}: {alone}; give --batch-size 1")
    return min(asked, questions)


def _fitting(asker: Session, answer_tokens: int) -> int:
    device = asker.index.model.device
    most = AT_ONCE.get(device.type, 1)
    if device.type != "cuda":
        return most
    rows = [one for layer in asker.cache.stored_layers for one in (layer.keys, layer.values) if one is not None]
    token = sum(one.shape[0] * one.shape[2] * one.element_size() for one in rows)
    free = torch.cuda.mem_get_info(device)[0]
    return min(most, int(SHARE_OF_FREE * free) // (2 * token * (QUESTION_ROWS + answer_tokens)))


def batch_of(asker: Session, sampling: Sampling, size: int) -> Batch | None:
    """Room for so many questions at once; None for one after another."""
    return Batch(asker.index, asker.cache, sampling, size) if size > 1 else None


def batch_answers(
    asker: Session, batch: Batch | None, questions: Sequence[torch.Tensor | None], sampling: Sampling
) -> Iterator[Answer]:
    """Answers in the order of the questions, each as soon as those before it are there; an empty one for None."""
    if batch is None:
        yield from (NO_ANSWER if one is None else asker.ask(one, sampling) for one in questions)
        return
    asked = [number for number, one in enumerate(questions) if one is not None]
    ready: dict[int, Answer] = {number: NO_ANSWER for number, one in enumerate(questions) if one is None}
    answers = batch.answers([one for one in questions if one is not None])
    for number in range(len(questions)):
        while number not in ready:
            place, answer = next(answers)
            ready[asked[place]] = answer
        yield ready.pop(number)
