"""Read and tokenise all questions of a call, so that errors are found before the first is answered."""

from collections import Counter
from collections.abc import Sequence

import torch

from sparsekv.cli.common.console import note_plain
from sparsekv.cli.common.questions import read_lines, read_question
from sparsekv.formats.documents.plain_text import encode_text
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.decoding.generate import answer_room, question_ids
from sparsekv.runtime.decoding.open import OpenIndex


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
