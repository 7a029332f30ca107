"""Tasks on an unchanged text: the user's questions with their answers, and perplexity of its continuation."""

import random
import re

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.evaluation.haystack import depth_of, fill
from sparsekv.runtime.evaluation.tasks import Context, Question, Request, Task, tasks

INSTRUCTION = (
    "Answer the question based on the given document. Only give me the answer and do not output any other words."
)
ANSWER_TOKENS = 32
CONTINUATION_TOKENS = 64


def ask(question: str, answers: tuple[str, ...], text: str, metric: str = "f1") -> Question:
    """A question about a document, with the depth at which an answer occurs literally, if one does."""
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
    """One context, the beginning of the text, with many questions about it (PreFixQA's form, arXiv 2411.09688).

    Questions whose answer occurs in the text only after the context's end are left out.
    """

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
        asked = [ask(question, answers, text) for question, answers in request.pairs if _inside(answers, text, request)]
        if not asked:
            raise UsageError(
                f"no answer of --pairs stands in the first {request.length} tokens; give a larger --length"
            )
        return [Context("qa", f"{request.length} tokens", text, tuple(asked[: request.questions]), request.length)]


def _inside(answers: tuple[str, ...], text: str, request: Request) -> bool:
    return any(answer in text for answer in answers) or not any(answer in request.text for answer in answers)


class Continuation(Task):
    """Windows of the text, each scored by the perplexity of the words that follow it."""

    def make(self, request: Request) -> list[Context]:
        pieces = re.findall(r"\s*\S+", request.text)
        return [self._context(request, number, pieces) for number in range(request.contexts)]

    def _context(self, request: Request, number: int, pieces: list[str]) -> Context:
        drawn = random.Random(f"{request.seed} perplexity {request.length} {number}")
        # A word has at least one token, so windows up to this start have enough words to fill their length.
        last = max(1, len(pieces) - request.length - CONTINUATION_TOKENS)
        part = last / request.contexts
        start = int(number * part + drawn.random() * part)
        window = fill(pieces[start:], _joined, request.count, request.length, "perplexity")
        rest = "".join(pieces[start + len(window) :][:CONTINUATION_TOKENS])
        if not rest:
            raise UsageError("no text follows the context, for --task perplexity; give a longer text or less --length")
        question = Question("", (rest,), "perplexity", CONTINUATION_TOKENS)
        return Context(
            "perplexity", f"{request.length} tokens, {number}", _joined(window), (question,), request.length, bare=True
        )


def _joined(pieces: list[str]) -> str:
    return "".join(pieces).lstrip()


tasks.add("qa", QuestionAnswering())
tasks.add("perplexity", Continuation())
