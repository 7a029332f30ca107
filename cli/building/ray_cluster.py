"""Index documents by the workers of a Ray cluster, each one document at a time; one that dies costs one document.

Ray's own batch jobs end with the first worker that dies; here its document goes to another worker, which resumes it.
"""

import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsekv.cli.building.ray_worker import Worker, work_quietly
from sparsekv.cli.building.recipe import Recipe
from sparsekv.cli.building.several import Done
from sparsekv.cli.building.targets import Target
from sparsekv.formats.errors import SparsekvError, UsageError

LOCAL = "local"
_PATIENCE = 10.0  # seconds
MOST_DEATHS = 3
"""Workers that may die with one document before it is set aside, and in all before any has loaded the model."""


@dataclass
class RayCluster:
    """Documents that wait for workers, and workers, each with at most one document.

    count: workers; None for one a GPU, or where there is none one for four CPUs.
    """

    recipe: Recipe
    address: str
    count: int | None
    ready: bool = False
    deaths: Counter[Target | None] = field(default_factory=Counter)
    busy: dict[Any, tuple[Any, Target | None]] = field(default_factory=dict)

    def index(self, targets: Sequence[Target]) -> Iterator[tuple[Target, str]]:
        """Each document with what went wrong, in one line, empty for nothing; as they are done, the longest first.

        Raises:
            UsageError: Ray is not installed, or there is no cluster at the address.
            SparsekvError: workers cannot load the model, or die while they do.
        """
        with _joined(self.address) as ray:
            waiting = sorted(targets, key=_size)
            workers = min(self._workers(ray), len(waiting))
            for _ in range(workers):
                self._start(ray, workers)
            while self.busy:
                done = ray.wait(list(self.busy))[0][0]
                worker, target = self.busy.pop(done)
                try:
                    wrong = ray.get(done)
                except ray.exceptions.RayError as error:
                    yield from self._bury(target, waiting, error)
                    self._start(ray, workers)
                    continue
                if target is None and wrong:
                    raise SparsekvError(wrong)
                self.ready = True
                if target is not None:
                    yield target, wrong
                if waiting:
                    self._give(worker, waiting.pop())

    def _workers(self, ray: Any) -> int:
        there = ray.cluster_resources()
        return self.count or int(there.get("GPU", 0)) or max(1, int(there.get("CPU", 1)) // 4)

    def _start(self, ray: Any, workers: int) -> None:
        """Start a worker, with a GPU or its share of the CPUs."""
        there = ray.cluster_resources()
        share = {"num_gpus": 1} if there.get("GPU", 0) else {"num_cpus": max(1, int(there.get("CPU", 1)) // workers)}
        worker = ray.remote(Worker).options(**share).remote(self.recipe, share.get("num_cpus"))
        self.busy[worker.load.remote()] = worker, None

    def _give(self, worker: Any, target: Target) -> None:
        self.busy[worker.index.remote(target)] = worker, target

    def _bury(self, target: Target | None, waiting: list[Target], error: Exception) -> Iterator[tuple[Target, str]]:
        """Count a worker's death; its document, unless it has seen too many, waits to be the last.

        So deaths that are nobody's fault meet different documents, and one that kills its workers delays no other.
        """
        self.deaths[target] += 1
        if self.deaths[target] < MOST_DEATHS:
            waiting[:0] = [target] if target is not None else []
        elif target is None and not self.ready:
            why = " ".join(str(error).split())[:200]
            raise SparsekvError(f"workers die while they load the model ({why}); give fewer --workers, or more memory")
        elif target is not None:
            yield target, f"{MOST_DEATHS} workers died while they indexed it; it is set aside: build it by itself"


def index_by_ray(cluster: RayCluster, targets: Sequence[Target], done: Done) -> None:
    """Index all documents by a cluster.

    Raises:
        UsageError: a document is standard input, which workers do not have; or what `RayCluster.index` raises.
    """
    if any(one.document == "-" for one in targets):
        raise UsageError("--ray: workers have no standard input; name a file")
    named = {_whole(one): one for one in targets}
    elsewhere = replace(cluster, recipe=work_quietly(cluster.recipe))
    for whole, wrong in elsewhere.index(list(named)):
        done(named[whole], wrong.replace(whole.document, named[whole].document))


def _whole(target: Target) -> Target:
    """A target by paths that mean the same in every process that shares the folder."""
    return Target(os.path.abspath(target.document), target.folder.absolute())


def _size(target: Target) -> int:
    try:
        return Path(target.document).stat().st_size
    except OSError:
        return 0


@contextmanager
def _joined(address: str) -> Iterator[Any]:
    """Ray, connected to the cluster at an address, or to one on this machine that ends with the context."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UsageError("--ray needs Ray: pip install 'sparsekv[ray]'") from None
    _check_answers(address)
    # Ray prints what it notices of workers to stdout, from threads of its own.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            ray.init(
                address=None if address == LOCAL else address,
                log_to_driver=False,
                configure_logging=False,
                include_dashboard=False if address == LOCAL else None,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            why = " ".join(str(error).split())[:200]
            raise UsageError(
                f"--ray {address}: no Ray cluster answers there ({why}); give local, auto or HOST:PORT, with "
                "RAY_AUTH_MODE=token in the environment where a cluster wants a token"
            ) from None
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise UsageError where nobody listens at HOST:PORT: Ray would end the process for it."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, ValueError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error).lower()
        raise UsageError(f"--ray {address}: no cluster answers there ({why}); give local or HOST:PORT") from None
