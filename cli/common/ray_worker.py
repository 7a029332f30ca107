"""One worker of a Ray cluster: it makes itself ready once, and does the jobs that it is given."""

import os
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from sparsekv.cli.common.failures import describe
from sparsekv.cli.common.quiet_libraries import quiet_libraries

Recipe = TypeVar("Recipe")
Job = TypeVar("Job")


class RayWorker(ABC, Generic[Recipe, Job]):
    """What went wrong comes back as one line, because not every error can travel between processes.

    Args:
        recipe: how jobs are done.
        threads: of torch; None for its own number.
    """

    command: ClassVar[str]
    """The command whose work it is."""

    def __init__(self, recipe: Recipe, threads: int | None):
        self.recipe = recipe
        if threads is not None:
            import torch

            torch.set_num_threads(threads)

    @abstractmethod
    def prepare(self) -> None:
        """Load what every job needs."""

    @abstractmethod
    def work(self, job: Job) -> None:
        """Do a job, or resume it."""

    def load(self) -> str:
        """Prepare; returns what went wrong, empty for nothing."""
        try:
            with quiet_libraries(debug=False):
                self.prepare()
        except Exception as error:
            return describe(error, self.command)
        return ""

    def do(self, job: Job) -> str:
        """Do a job; returns what went wrong, empty for nothing."""
        try:
            with quiet_libraries(debug=False):
                self.work(job)
        except Exception as error:
            return describe(error, self.command)
        return ""


def whole_model(name: str | None) -> str | None:
    """A model's name as it means the same in a process of another folder."""
    if name is None or not os.path.isdir(folder := os.path.expanduser(name)):
        return name
    return os.path.abspath(folder)
