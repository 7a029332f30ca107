"""The served indices (`Shelf`): those that the command line names, and those of a folder.

An index of the folder is opened at the first request for it. An index that was replaced is opened again. A request's
model name stands for an index, a method and a budget.
"""

import asyncio
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path

from sparsekv.cli.common.console import note
from sparsekv.cli.serving.errors import ApiError
from sparsekv.cli.serving.requests import Extension
from sparsekv.cli.serving.responses import ModelDetails, ModelSent
from sparsekv.formats.errors import SparsekvError, UsageError, command, reason_of, suggestion
from sparsekv.formats.index.schema import MANIFEST
from sparsekv.runtime.api import api_words
from sparsekv.runtime.attention.config import DecodeConfig, Dense, QuestionPrefill
from sparsekv.runtime.attention.guard import estimates_missed
from sparsekv.runtime.decoding.choose_config import (
    attention_of,
    choose_config,
    prefill_method,
    question_prefill,
    refuse_beside_dense,
    refuse_idle_budget,
)
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.selection.interface import DENSE, Budget, methods
from sparsekv.runtime.selection.registry import methods_of
from sparsekv.runtime.serving.scheduler import Scheduler

ENDING = ".skv"


def served_name(folder: Path) -> str:
    """Return the name under which an index is served: the name of its folder without `.skv`.

    Raises:
        UsageError: the name is not text in UTF-8.
    """
    name = folder.absolute().name.removesuffix(ENDING)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{folder}: its name is not text in UTF-8, so no request can name it; rename it") from None
    return name


def folders_by_name(folders: Iterable[Path]) -> dict[str, Path]:
    """Return folders of indices by served name. A folder that is given twice is served once.

    Raises:
        UsageError: two folders have the same served name, or a name is not text in UTF-8.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        _refuse_clash(found.setdefault(served_name(folder), folder), folder)
    return found


def refuse_clashes(named: dict[str, Path], folder: Path) -> None:
    """Raise UsageError if an index in a folder has the served name of another index in `named`, or if the folder cannot
    be read."""
    for one in indices_in(folder):
        _refuse_clash(named.get(served_name(one), one), one)


def _refuse_clash(first: Path, second: Path) -> None:
    if first.resolve() != second.resolve():
        raise UsageError(f"{first} and {second} would both be served as {served_name(first)}; rename one of them")


def refuse_no_folder(folder: Path) -> None:
    """Raise UsageError if --indices-from is an index itself."""
    if (folder / MANIFEST).is_file():
        told = f"--indices-from {folder} is an index itself, not a folder of indices"
        raise UsageError(f"{told}; give it as INDEX: {command('serve', folder)}")


def note_broken(folder: Path) -> None:
    """Print a note for each `*.skv` in a folder that is not served because it has no manifest."""
    for one in sorted(folder.glob(f"*{ENDING}")):
        if one.is_dir() and not one.is_symlink() and not (one / MANIFEST).is_file():
            note(f"{one} is not served: it has no {MANIFEST}, so it is not a complete index", quiet=False)


def indices_in(folder: Path) -> Iterator[Path]:
    """Yield the indices in a folder, in the order of their names: the subfolders `*.skv` that have a manifest.

    Links and folders with unprintable characters in their name are left out.

    Raises:
        UsageError: the folder cannot be read.
    """
    try:
        found = [one.name for one in os.scandir(folder) if one.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise UsageError(f"--indices-from {folder} cannot be read: {reason_of(error)}; name a folder") from None
    for name in sorted(found):
        if name.endswith(ENDING) and (folder / name / MANIFEST).is_file() and name.isprintable():
            yield folder / name


@dataclass(frozen=True, eq=False)
class Served:
    """An open index, and the config of requests that name no method, budget or prefill.

    Attributes:
        by_method: the config of requests that need a method but name none. It differs from `config` if `config` is
            dense attention because that is faster.
        budget: the budget of the command line, used with every method but `dense`; None: the default budget of each
            method.
    """

    name: str
    opened: OpenIndex
    config: DecodeConfig
    by_method: DecodeConfig
    budget: str | None


State = tuple[int, int, int]


def state_of(folder: Path) -> State | None:
    """Return inode, modification time and size of an index's manifest; None without a manifest.

    The result changes when the index is replaced.
    """
    try:
        found = os.stat(folder / MANIFEST)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class Shelf:
    """The served indices: those that the command line names, and those in one folder.

    An index of the folder is opened at the first request for that index. An index whose manifest has been replaced is
    opened again at the next request; answers that have begun still read the old index. The old index stays in use if
    the new index cannot be opened or has no manifest. If the open indices exceed `memory`, the least recently used
    indices without requests are closed. The next request for such an index opens it again.

    Args:
        open_index: opens an index under a name; called in a thread of `executor`.
        folder: folder of further indices; None: there are none.
        memory: maximum bytes of the open documents' keys and values. The last used index stays open in any case.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        open_index: Callable[[str, Path], Served],
        executor: Executor,
        folder: Path | None = None,
        memory: float = inf,
    ):
        self.scheduler, self.open_index, self.executor = scheduler, open_index, executor
        self.folder, self.memory = folder, memory
        self._served: dict[str, Served] = {}
        """Open indices by name, the least recently used index first."""
        self._places: dict[str, tuple[Path, State | None]] = {}
        self._users = Counter[Served]()
        self._opening = asyncio.Lock()

    def put(self, served: Served, folder: Path, state: State | None) -> None:
        """Serve an index. It replaces an index of the same name. Other indices are closed if memory is exceeded.

        Args:
            state: the result of `state_of` for the index's folder before the index was opened.
        """
        self._served.pop(served.name, None)
        self.scheduler.add(served.name, served.opened)
        self._served[served.name], self._places[served.name] = served, (folder, state)
        self._make_room()

    def close(self, name: str) -> None:
        """Close an index if it is open. Its running answers are completed; then its memory is freed."""
        if self._served.pop(name, None) is not None:
            self.scheduler.remove(name)
            if self._places[name][0].parent == self.folder:
                del self._places[name]  # the folder may no longer exist at the next request

    def holds(self, served: Served) -> bool:
        """Whether an index is still served under its name."""
        return self._served.get(served.name) is served

    @contextmanager
    def using(self, served: Served) -> Iterator[None]:
        """Keep an index open within the context even if memory is exceeded."""
        self._users[served] += 1
        try:
            yield
        finally:
            self._users[served] -= 1
            self._users += Counter()  # removes entries with count 0

    def opened(self) -> list[Served]:
        """Return the indices that are open."""
        return [one for name in self._places if (one := self._served.get(name)) is not None]

    def names(self) -> list[str]:
        """Return the names of all indices. Indices that have been opened come first."""
        return list({**self._places, **self._offered()})

    def is_offered(self, name: str) -> bool:
        """Whether an index is in the folder whose indices clients may open and close."""
        return name in self._offered()

    async def find(self, name: str) -> Served | None:
        """Return an index, and open it if it is closed or has been replaced; None if no index has this name.

        Raises:
            SparsekvError: the index cannot be opened, and no earlier version of it is open; or the folder of indices
                cannot be read.
        """
        if (served := self._current(name)) is not None:
            return served
        async with self._opening:
            if (served := self._current(name)) is not None:
                return served
            folder = self._places[name][0] if name in self._places else self._offered().get(name)
            return None if folder is None else await self._open(name, folder)

    def without_folders(self, message: str) -> str:
        """Replace the paths of indices in a message by folder names, because clients must not see paths."""
        paths = [folder for folder, _ in self._places.values() if os.sep in str(folder)]
        for path in sorted(paths, key=lambda one: len(str(one)), reverse=True):
            message = message.replace(str(path), path.name)
        return message if self.folder is None else message.replace(f"{self.folder}{os.sep}", "")

    def _current(self, name: str) -> Served | None:
        """Return an index and mark it as most recently used; None if it is not open, or if its manifest was replaced.

        An index without a manifest, such as one that is just being replaced, is returned.
        """
        if name not in self._served:
            return None
        folder, state = self._places[name]
        if state_of(folder) not in (state, None):
            return None
        self._served[name] = self._served.pop(name)
        return self._served[name]

    def _make_room(self) -> None:
        """Close indices without requests until the open indices fit `memory`. The last used index stays open."""
        *others, last = self._served.values()
        taken = sum(one.opened.document_bytes for one in (*others, last))
        for one in others:
            if taken > self.memory and not self._users[one] and not self.scheduler.is_asked(one.opened):
                self.close(one.name)
                taken -= one.opened.document_bytes

    def _offered(self) -> dict[str, Path]:
        """Return the indices of the folder by name. Raises SparsekvError if the folder cannot be read any more."""
        try:
            return {} if self.folder is None else {served_name(one): one for one in indices_in(self.folder)}
        except UsageError as error:
            raise SparsekvError(str(error)) from None

    async def _open(self, name: str, folder: Path) -> Served:
        state, before = state_of(folder), self._served.get(name)
        try:
            served = await asyncio.get_running_loop().run_in_executor(self.executor, self.open_index, name, folder)
        except SparsekvError as error:
            if before is None:
                raise
            note(
                f"{name} has changed and cannot be opened, so it is served as it was before the change: {error}",
                quiet=False,
            )
            self._places[name] = folder, state
            return before
        self.put(served, folder, state)
        return served


SETTING = re.compile(r"(?::(?P<method>[^@:]+))?(?:@(?P<budget>[^@:]+))?")
"""The part of a model name after the name of an index: `:METHOD`, `@BUDGET`, or both."""


async def find(shelf: Shelf, model: str, extension: Extension | None = None) -> tuple[Served, DecodeConfig]:
    """Return the index of a model name, and the config of the answer.

    Raises:
        ApiError: the index does not exist (404), or the method, budget, prefill or gauge cannot be used (400).
        SparsekvError: the index cannot be opened.
    """
    name, method, budget = _parsed(shelf, model)
    if (served := await shelf.find(name)) is None:
        raise unknown(shelf, model)
    own = extension or Extension()
    for field, by_model, given in (("method", method, own.method), ("budget", budget, own.budget)):
        if by_model is not None and given is not None:
            told = f"the model {model} names a {field} already; leave sparsekv.{field} out"
            raise ApiError(400, told, param=f"sparsekv.{field}", code="invalid_value")
    # `str` keeps 1 (one token) and 1.0 (all tokens) apart, as on the command line.
    written = budget if own.budget is None else str(own.budget)
    try:
        with api_words():
            config = config_of(served, method or own.method, written, own.prefill, gauge=bool(own.gauge))
            return served, _gauged(served, config) if own.gauge else config
    except UsageError as error:
        param = "model" if method or budget else "sparsekv"
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


def described(served: Served) -> ModelSent:
    """Return the entry of an open index in `/v1/models`."""
    artifact = served.opened.artifact
    details = ModelDetails(
        model=Path(artifact.manifest.model.id).name,  # clients must not see the folder of a local model
        tokens=artifact.manifest.split.tokens,
        methods=[*methods_of(artifact), DENSE],
        method=served.config.attention.name,
        budget=served.config.budget.value,
        dense_from=served.config.dense_from,
    )
    created = int(datetime.fromisoformat(artifact.manifest.created).timestamp())
    return ModelSent(id=served.name, created=created, sparsekv=details)


def listed(shelf: Shelf) -> list[ModelSent]:
    """Return the entries of all indices in `/v1/models`. Indices that are not open have no details."""
    opened = {one.name: described(one) for one in shelf.opened()}
    return [opened.get(name) or ModelSent(id=name, created=0) for name in shelf.names()]


def _parsed(shelf: Shelf, model: str) -> tuple[str, str | None, str | None]:
    """Split a model name into the name of an index, a method and a budget.

    A model name that equals the name of an index has neither method nor budget. The name of the index may end in
    `.skv`, like the name of its folder. Raises ApiError (404) if no index has the name.
    """
    names = shelf.names()
    if model in names:
        return model, None, None
    for name in sorted(names, key=len, reverse=True):
        for written in (name + ENDING, name):
            if model.startswith(written) and (found := SETTING.fullmatch(model, len(written))):
                return name, found["method"], found["budget"]
    raise unknown(shelf, model)


def unknown(shelf: Shelf, model: str, param: str = "model") -> ApiError:
    """Return the error for a name without an index. `param` is the field of the request that has the name."""
    names = shelf.names()
    told = f"no model '{model}'{suggestion(model, names)}; there are: {', '.join(names)}"
    return ApiError(404, told, param=param, code="model_not_found")


def config_of(
    served: Served,
    method: str | None = None,
    budget: str | None = None,
    prefill: str | None = None,
    *,
    gauge: bool = False,
) -> DecodeConfig:
    """Return the config of a request. An argument is None if the request does not set it.

    Dense attention does not use the method that `--prefill` of the server names. If the server has chosen dense
    attention because it is faster, a request with a budget, a gauge or a method in `prefill` gets the default method.

    Args:
        gauge: whether the request needs a method that estimates its missed mass. The config does not measure it yet.

    Raises:
        UsageError: the method or the prefill does not exist, the budget is not valid, or the values contradict each
            other.
    """
    artifact, given, named = served.opened.artifact, budget, prefill_method(served.opened.artifact, prefill)
    needs_method = budget is not None or named or gauge
    config = served.by_method if needs_method and isinstance(served.config.attention, Dense) else served.config
    if method is not None:
        _, kind = attention_of(artifact, method)
        if budget is None and kind is not Dense:
            budget = served.budget
        chosen = choose_config(artifact, method, budget=budget, placement=config.placement)
        config = replace(chosen, question=config.question)
    elif budget is not None:
        if isinstance(config.attention, Dense):
            refuse_beside_dense({"--budget": budget})
        config = replace(config, budget=Budget.parse(budget), layer_budgets={}, dense_from=None, origin="")
    refuse_idle_budget(config.attention, "--budget", given)
    if prefill is not None:
        config = replace(config, question=question_prefill(prefill, None, named, {}))
    if isinstance(config.attention, Dense) and isinstance(config.question, QuestionPrefill):
        refuse_beside_dense({"--prefill": prefill})
        return replace(config, question=Dense())
    return config


def _gauged(served: Served, config: DecodeConfig) -> DecodeConfig:
    """Return a config that measures the missed mass. Raises UsageError if the method cannot estimate it."""
    if isinstance(config.attention, Dense):
        refuse_beside_dense({"gauge": True})
    elif not estimates_missed(config.attention.method, residual=config.attention.residual):
        artifact = served.opened.artifact
        able = [name for name in methods_of(artifact) if estimates_missed(methods()[name](), residual=False)]
        remedy = f"ask by {' or '.join(able)}, or leave it out" if able else "leave it out"
        raise UsageError(f"gauge: {config.attention.name} cannot estimate how much attention it misses; {remedy}")
    return replace(config, gauge=True)
