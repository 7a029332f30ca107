"""Answer a call's questions: one after another, or several at once."""

from collections.abc import Iterator, Sequence

import torch

from sparsekv.cli.answering.options import AT_ONCE
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.decoding.asker import Asker
from sparsekv.runtime.decoding.batch import Batch, why_alone
from sparsekv.runtime.decoding.generate import NO_ANSWER, Answer, Sampling

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


def choose_batch_size(asked: int | None, asker: Asker, questions: int, answer_tokens: int) -> int:
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


def _fitting(asker: Asker, answer_tokens: int) -> int:
    device = asker.index.model.device
    most = AT_ONCE.get(device.type, 1)
    if device.type != "cuda":
        return most
    rows = [one for layer in asker.cache.stored_layers for one in (layer.keys, layer.values) if one is not None]
    token = sum(one.shape[0] * one.shape[2] * one.element_size() for one in rows)
    free = torch.cuda.mem_get_info(device)[0]
    return min(most, int(SHARE_OF_FREE * free) // (2 * token * (QUESTION_ROWS + answer_tokens)))


def batch_of(asker: Asker, sampling: Sampling, size: int) -> Batch | None:
    """Room for so many questions at once; None for one after another."""
    return Batch(asker.index, asker.cache, sampling, size) if size > 1 else None


def batch_answers(
    asker: Asker, batch: Batch | None, questions: Sequence[torch.Tensor | None], sampling: Sampling
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
