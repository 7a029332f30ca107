"""Contexts and questions of an evaluation, and the registry of the tasks that generate them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from sparsekv.formats.errors import UsageError, suggestion
from sparsekv.formats.registry import Registry

CountTokens = Callable[[str], int]
"""Counts the tokens of a text with the evaluated model's tokenizer."""

QUESTIONS = 5


@dataclass(frozen=True)
class Question:
    """One question about a context, with the metric and the expected answers that score it.

    Attributes:
        text: the question's text after the document.
        answers: the expected answers. For a `continuation` metric: the text that follows the document. Empty for a
            metric whose expected answer is that of dense attention.
        metric: name in `metrics.METRICS`.
        max_new_tokens: largest number of tokens of an answer, or of the continuation that is scored.
        prefix: beginning of the answer, which the model continues.
        depth: position of the answer, or of its needle, as a share of the document's characters; None if there is no
            single or no known position.
        placed: the depth at which a task was to put the needle; None if it was to be nowhere in particular. The needle
            lies between sentences near this depth.
        classes: labels of a classification.
        needle: the sentence at `depth` that has the answer; empty if the answer itself is at `depth`.
        earlier: in a conversation, the questions of the turns before this one.
    """

    text: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    prefix: str = ""
    depth: float | None = None
    placed: float | None = None
    classes: tuple[str, ...] = ()
    needle: str = ""
    earlier: tuple["Question", ...] = ()


@dataclass(frozen=True)
class Context:
    """One document with the questions about it. An index of the document serves all its questions.

    `length` is the requested number of tokens, or None for a document of published data. With `bare` no chat template
    is used.
    """

    task: str
    name: str
    text: str
    questions: tuple[Question, ...]
    length: int | None = None
    bare: bool = False


def in_turns(context: Context) -> Context:
    """Return the context with its questions as the turns of one conversation."""
    asked = context.questions
    return replace(context, questions=tuple(replace(one, earlier=asked[:turn]) for turn, one in enumerate(asked)))


@dataclass(frozen=True)
class Request:
    """The contexts to generate: `contexts` contexts of `length` tokens, with up to `questions` questions each.

    `text` is the text from which contexts are made, and `count` returns the number of tokens of a text. `pairs` are the
    user's questions about the text with their answers. If `questions` is None, a context has five questions, or for
    tasks with pairs, all pairs. Needles are placed at each of `depths`, from 0 to 1, in turn; without `depths`, evenly.
    Raises UsageError for a depth outside 0 to 1, and for a length or number of contexts or questions below 1.
    """

    text: str
    count: CountTokens
    length: int
    contexts: int = 4
    questions: int | None = None
    depths: tuple[float, ...] = ()
    seed: int = 0
    pairs: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        sizes = {"--length": self.length, "--contexts": self.contexts, "--questions": self.questions}
        for option, value in sizes.items():
            if value is not None and value < 1:
                raise UsageError(f"{option} {value}: give at least 1")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UsageError(f"--depth {100 * depth:g}: give a percentage from 0 to 100")

    def asked(self) -> int:
        """Return the number of questions of a context, for a task that can generate any number of questions."""
        return QUESTIONS if self.questions is None else self.questions

    def depth(self, number: int, needles: int, option: str = "--questions") -> float:
        """Return the depth, from 0 to 1, of the needle with index `number` among `needles` needles.

        Raises UsageError if there are more depths than needles. `option` is the option that adds needles.
        """
        if len(self.depths) > needles:
            told = f"--depth: {len(self.depths)} depths are given, and only {needles} needles are hidden"
            raise UsageError(f"{told}; give fewer depths, or {option} {len(self.depths)}")
        return self.depths[number % len(self.depths)] if self.depths else (number + 0.5) / needles


class Task(ABC):
    """Generates the contexts and questions of one kind of task.

    Attributes:
        options: options of `eval` that only some tasks read, among them this task.
        unread: options of `eval` that most tasks read, and this task does not.
        needs_text: whether contexts are made from the request's text. Otherwise they are generated without a text.
    """

    options: ClassVar[tuple[str, ...]] = ()
    unread: ClassVar[tuple[str, ...]] = ()
    needs_text: ClassVar[bool] = True

    @abstractmethod
    def make(self, request: Request) -> list[Context]:
        """Generate contexts with questions. The same request always gives the same contexts.

        Raises:
            UsageError: the text is too short or the length too small for the task, more questions are requested than
                the task has, or the request lacks the pairs that the task needs.
        """


class DrawnTask(Task):
    """A task that draws each context separately, with its own random numbers."""

    def make(self, request: Request) -> list[Context]:
        return [self.draw(request, number) for number in range(request.contexts)]

    @abstractmethod
    def draw(self, request: Request, number: int) -> Context:
        """Draw context `number`, counted from 0. Raises the errors of `make`."""


tasks: Registry[Task] = Registry("task", "sparsekv.runtime.tasks")


def choose_task(name: str) -> Task:
    """Return the task of a name; raise UsageError if no task has this name."""
    if name not in tasks():
        raise UsageError(f"no task '{name}'; there are: {', '.join(tasks())}{suggestion(name, tasks())}")
    return tasks()[name]
