"""Run jobs on the workers of a Ray cluster. Each worker runs one job at a time, so the death of a worker affects one
job."""

import os
import socket
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from sparsekv.cli.common.failures import describe
from sparsekv.cli.common.options import LOCAL
from sparsekv.cli.common.process import quiet_libraries
from sparsekv.formats.errors import SparsekvError, UsageError

Recipe = TypeVar("Recipe")
Job = TypeVar("Job")


class RayWorker(ABC, Generic[Recipe, Job]):
    """A worker of a Ray cluster. It returns an error as one line of text, because not every exception can be pickled.

    Args:
        recipe: the settings that all jobs share.
        threads: number of torch threads; None for torch's default.
    """

    command: ClassVar[str]
    """The command whose jobs the worker does."""

    def __init__(self, recipe: Recipe, threads: int | None):
        self.recipe = recipe
        if threads is not None:
            import torch

            torch.set_num_threads(threads)

    @abstractmethod
    def prepare(self) -> None:
        """Load what every job needs, such as the model."""

    @abstractmethod
    def work(self, job: Job) -> None:
        """Do the work of one job. If an earlier run of the same job was interrupted, continue it."""

    def load(self) -> str:
        """Run `prepare` and catch any exception. Returns the error as one line of text, or an empty string if there was
        none."""
        try:
            with quiet_libraries(debug=False):
                self.prepare()
        except Exception as error:
            return describe(error, self.command)
        return ""

    def do(self, job: Job) -> str:
        """Run `work` on one job and catch any exception. Returns the error as one line of text, or an empty string if
        there was none."""
        try:
            with quiet_libraries(debug=False):
                self.work(job)
        except Exception as error:
            return describe(error, self.command)
        return ""


def whole_model(name: str | None) -> str | None:
    """Return a model's name, valid also in another current folder: the path of a local folder becomes absolute."""
    if name is None or not os.path.isdir(folder := os.path.expanduser(name)):
        return name
    return os.path.abspath(folder)


HashableJob = TypeVar("HashableJob", bound=Hashable)

_PATIENCE = 10.0  # seconds to wait for a connection to the cluster
MOST_DEATHS = 3
"""Number of workers that may die with one job before the job is set aside. It is also the number of workers that may
die in a row while they load: then no further worker is started."""


@dataclass
class RayCluster(Generic[HashableJob]):
    """A queue of jobs, and the workers of a Ray cluster, each with at most one job.

    Attributes:
        worker: class of the workers; each is made from the recipe.
        count: number of workers. None for one per GPU, or one per four CPUs if there is no GPU.
        deaths: for each job, the number of workers that died with it. The value of None is the number of workers that
            died while they loaded, in a row.
        why_died: the error of the last worker that died while it loaded.
        busy: for each pending call of Ray, its worker and the worker's job, which is None while the worker loads.
    """

    worker: type[RayWorker[Any, HashableJob]]
    recipe: Any
    address: str
    count: int | None
    deaths: Counter[HashableJob | None] = field(default_factory=Counter)
    why_died: str = ""
    busy: dict[Any, tuple[Any, HashableJob | None]] = field(default_factory=dict)

    def run(self, jobs: Sequence[HashableJob]) -> Iterator[tuple[HashableJob, str]]:
        """Run the jobs, the last one first. Yields each finished job with its error as one line of text, or with an
        empty string if it succeeded.

        Raises:
            UsageError: Ray is not installed, or there is no cluster at the address.
            SparsekvError: workers cannot load the model, or die while they load it.
        """
        with _joined(self.address) as ray:
            waiting = list(jobs)
            workers = min(self._workers(ray), len(waiting))
            for _ in range(workers):
                self._start(ray, workers)
            # When no job is left, do not wait for workers that still load. In a cluster that is too small for all
            # workers, some would start only after others have ended.
            while self.busy and (waiting or any(job is not None for _, job in self.busy.values())):
                done = ray.wait(list(self.busy))[0][0]
                worker, job = self.busy.pop(done)
                try:
                    wrong = ray.get(done)
                except ray.exceptions.RayError as error:
                    yield from self._bury(job, waiting, error)
                    if waiting and self.deaths[None] < MOST_DEATHS:
                        self._start(ray, workers)
                    continue
                if job is not None:
                    yield job, wrong
                elif wrong:
                    raise SparsekvError(wrong)
                else:
                    self.deaths[None] = 0
                if waiting:
                    job = waiting.pop()
                    self.busy[worker.do.remote(job)] = worker, job
            if waiting:
                why = f"workers die while they load the model ({self.why_died})"
                raise SparsekvError(f"{why}; give fewer --workers, or more memory")

    def _workers(self, ray: Any) -> int:
        there = ray.cluster_resources()
        return self.count or int(there.get("GPU", 0)) or max(1, int(there.get("CPU", 1)) // 4)

    def _start(self, ray: Any, workers: int) -> None:
        """Start a worker, with a GPU or its share of the CPUs."""
        there = ray.cluster_resources()
        share = {"num_gpus": 1} if there.get("GPU", 0) else {"num_cpus": max(1, int(there.get("CPU", 1)) // workers)}
        worker = ray.remote(self.worker).options(**share).remote(self.recipe, share.get("num_cpus"))
        self.busy[worker.load.remote()] = worker, None

    def _bury(
        self, job: HashableJob | None, waiting: list[HashableJob], error: Exception
    ) -> Iterator[tuple[HashableJob, str]]:
        """Count the death of a worker. Its job goes to the end of the queue.

        After MOST_DEATHS deaths with this job, the job is yielded with an error instead.

        At the end of the queue, a job that kills its workers delays no other job. If workers die for another reason,
        different jobs are affected, and none is set aside early.
        """
        self.deaths[job] += 1
        if job is None:
            self.why_died = " ".join(str(error).split())[:200]
        elif self.deaths[job] < MOST_DEATHS:
            waiting.insert(0, job)
        else:
            yield job, f"{MOST_DEATHS} workers died while they worked on it; it is set aside: run it by itself"


@contextmanager
def _joined(address: str) -> Iterator[Any]:
    """Connect to the Ray cluster at an address, or start a cluster on this machine that ends with the context.
    Yields the `ray` module.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UsageError("--ray needs Ray: pip install 'sparsekv[ray]'") from None
    _check_answers(address)
    # Ray prints messages about workers to stdout, from its own threads.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            with _silent_stderr():
                ray.init(
                    address=address,  # `local` starts a new cluster, whatever runs on this machine
                    log_to_driver=False,
                    configure_logging=False,
                    include_dashboard=False if address == LOCAL else None,
                )
        except (ConnectionError, ValueError, RuntimeError) as error:
            why = " ".join(str(error).split())[:200]
            raise UsageError(
                f"--ray {address}: no Ray cluster can be joined or started ({why}); give local, auto or HOST:PORT, and "
                "set RAY_AUTH_MODE=token if the cluster requires a token"
            ) from None
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Send stderr to /dev/null within the context. The caller reports in one line what Ray's libraries would print."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _check_answers(address: str) -> None:
    """Raise UsageError if nothing listens at HOST:PORT. Ray itself would end the process in this case."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, ValueError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error).lower()
        raise UsageError(f"--ray {address}: no cluster answers there ({why}); give local, auto or HOST:PORT") from None
