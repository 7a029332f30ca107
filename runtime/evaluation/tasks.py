"""What an evaluation asks, and the registry of generators that make it from any text: one family a file."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from sparsekv.formats.errors import UsageError
from sparsekv.formats.registry import Registry

CountTokens = Callable[[str], int]
"""How many tokens a text has for the model that is to read it."""

QUESTIONS = 5


@dataclass(frozen=True)
class Question:
    """One question about a context, and how its answer is scored.

    Attributes:
        text: what follows the document.
        prefix: how the answer begins; the model goes on from there.
        answers: what is expected, as the metric reads it; for a `continuation` metric the text that follows.
        metric: a name of `metrics.METRICS`.
        max_new_tokens: where an answer is cut off.
        depth: where in the document the answer stands, from 0 to 1; None where it stands in no one place.
        classes: the labels that a classification chooses from.
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
    """One document that is indexed once, and what is asked about it.

    `length` is the number of tokens that was asked for, None for a document of published data; `bare` ones are never
    put into a chat template.
    """

    task: str
    name: str
    text: str
    questions: tuple[Question, ...]
    length: int | None = None
    bare: bool = False


@dataclass(frozen=True)
class Request:
    """What contexts to make: `contexts` of `length` tokens with up to `questions` questions each, by default as many
    as there are where people wrote them, else five.

    `depths`, from 0 to 1, are taken in turn by what is hidden; none spreads it evenly. `pairs` are questions and
    answers about the text, for tasks that need some.
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
        """How many questions a task makes that can make any number."""
        return QUESTIONS if self.questions is None else self.questions

    def depth(self, number: int, of: int) -> float:
        """Depth of what is hidden as the `number`-th of `of`."""
        return self.depths[number % len(self.depths)] if self.depths else (number + 0.5) / of


class Task(ABC):
    """One kind of question, which makes contexts of its own."""

    @abstractmethod
    def make(self, request: Request) -> list[Context]:
        """Contexts with questions; the same request gives the same.

        Raises:
            UsageError: the text is too short, or the length too small, for what is to be hidden in it.
        """


tasks: Registry[Task] = Registry("task", "sparsekv.runtime.evaluation")


def choose_task(name: str) -> Task:
    """A task by its name; UsageError where there is none."""
    if name not in tasks():
        raise UsageError(f"no task '{name}'; there are: {', '.join(tasks())}")
    return tasks()[name]
