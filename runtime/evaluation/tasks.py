"""The contexts and questions of an evaluation, and the registry of tasks that generate them: one family per file."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from sparsekv.formats.errors import UsageError, suggestion
from sparsekv.formats.registry import Registry

CountTokens = Callable[[str], int]
"""Counts the tokens of a text with the evaluated model's tokenizer."""

QUESTIONS = 5


@dataclass(frozen=True)
class Question:
    """One question about a context, and how its answer is scored.

    Attributes:
        text: the text after the document.
        answers: the expected answers, as the metric uses them; for a `continuation` metric the text that follows.
        metric: a name in `metrics.METRICS`.
        max_new_tokens: where an answer is cut off.
        prefix: the beginning of the answer, which the model continues.
        depth: where the answer is in the document, from 0 to 1; None if it is in no single place.
        classes: the labels of a classification.
    """

    text: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    prefix: str = ""
    depth: float | None = None
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Context:
    """One document, which is indexed once, and the questions about it.

    `length` is the requested number of tokens, None for a document of published data. `bare`: never use a chat
    template.
    """

    task: str
    name: str
    text: str
    questions: tuple[Question, ...]
    length: int | None = None
    bare: bool = False


@dataclass(frozen=True)
class Request:
    """The contexts to make: `contexts` of `length` tokens with up to `questions` questions each.

    The default is five questions, or all of the user's `pairs`: questions and answers about the text, for tasks that
    need them. Needles are placed at `depths`, from 0 to 1, in turn; evenly without any.
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
        """The number of questions for a task that can generate any number."""
        return QUESTIONS if self.questions is None else self.questions

    def depth(self, number: int, of: int) -> float:
        """Depth of the `number`-th of `of` needles."""
        return self.depths[number % len(self.depths)] if self.depths else (number + 0.5) / of


class Task(ABC):
    """Generates the contexts and questions of one kind."""

    @abstractmethod
    def make(self, request: Request) -> list[Context]:
        """Contexts with questions; deterministic for a request.

        Raises:
            UsageError: the text is too short, or the length too small for the task.
        """


class DrawnTask(Task):
    """A task each of whose contexts is drawn by random numbers of its own."""

    def make(self, request: Request) -> list[Context]:
        return [self.draw(request, number) for number in range(request.contexts)]

    @abstractmethod
    def draw(self, request: Request, number: int) -> Context:
        """The context of this number; raises what `make` raises."""


tasks: Registry[Task] = Registry("task", "sparsekv.runtime.evaluation")


def choose_task(name: str) -> Task:
    """The task of that name; UsageError if there is none."""
    if name not in tasks():
        raise UsageError(f"no task '{name}'; there are: {', '.join(tasks())}{suggestion(name, tasks())}")
    return tasks()[name]
