"""Build the indices of several documents, in this process or on a Ray cluster, once or whenever their texts change.

A document that fails does not stop the others. `build-index --watch` waits for changes on disk.
"""

import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.cli.building.recipe import BuildRecipe, Target
from sparsekv.cli.common.console import note, progress, say, tell
from sparsekv.cli.common.failures import causes, describe
from sparsekv.cli.common.ray_cluster import RayCluster, RayWorker, whole_model
from sparsekv.cli.common.streams import printable
from sparsekv.formats.documents.files import IGNORE_FILE, folder_of_glob, is_glob
from sparsekv.formats.errors import ENDING, SparsekvError, UsageError
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.plan import Progress

Done = Callable[[Target, str], None]
"""Called for each finished document, with its error as one line of text, or an empty string if it is indexed."""


Work = Callable[[Sequence[Target], Progress, Done], None]
"""Indexes the targets, reports its progress, and calls `Done` for each target."""


def index_several(targets: Sequence[Target], work: Work, *, quiet: bool) -> None:
    """Index several documents, and print the path of each index when it is complete.

    Missing files are reported first, and documents that could not be indexed at the end.

    Raises:
        SparsekvError: some documents could not be indexed; or the errors of `work`.
    """
    failures: dict[str, str] = {}
    results, count = sys.stdout, 0  # the original stdout, because the Ray cluster redirects sys.stdout

    def done(target: Target, wrong: str) -> None:
        nonlocal count
        count += 1
        show("documents", count, len(there))
        if wrong:
            failures[target.document] = wrong
        else:
            say(str(target.folder), to=results)

    there = [target for target in targets if target.document == "-" or os.path.exists(target.document)]
    for target in targets:
        if target not in there:
            others = "; the others are indexed" if there else ""
            tell(printable(f"no such file: {target.document}{others}"), soft_wrap=True)
    with progress(quiet=quiet) as show:
        if there:
            show("documents", 0, len(there))
            work(there, show, done)
    for document, why in failures.items():
        named = why.startswith(document) or why.endswith(document)
        tell(printable(why if named else f"{document}: {why}"), soft_wrap=True)
    if wrong := len(targets) - len(there) + len(failures):
        raise SparsekvError(
            f"{wrong} of {len(targets)} documents {'was' if wrong == 1 else 'were'} not indexed, for the reasons "
            "above; run the same command again to retry only these"
        )


def index_here(recipe: BuildRecipe, targets: Sequence[Target], show: Progress, done: Done) -> None:
    """Index one document after another, with the model loaded once.

    Raises:
        SparsekvError: the model cannot be loaded.
    """
    loaded = recipe.load()
    for number, target in enumerate(targets, 1):
        note(f"{target.document} ({number} of {len(targets)})", quiet=recipe.quiet)
        done(target, failure(lambda: recipe.index(target, lambda: loaded, show)))  # noqa: B023


def failure(build: Callable[[], None]) -> str:
    """Run a build and return its error as one line of text, or an empty string. Ctrl-C is raised."""
    error = _error_of(build)
    return "" if error is None else describe(error, "build-index")


def _error_of(build: Callable[[], None]) -> Exception | None:
    """Run a build and return its error, if there is one. Ctrl-C is raised."""
    try:
        build()
    except Exception as error:
        if any(isinstance(one, KeyboardInterrupt) for one in causes(error)):
            raise  # libraries turn Ctrl-C into errors of their own
        return error
    return None


class IndexWorker(RayWorker[BuildRecipe, Target]):
    """A Ray worker that holds a model, and builds or resumes the index of a document."""

    command = "build-index"
    loaded: LoadedModel

    def prepare(self) -> None:
        self.loaded = self.recipe.load()

    def work(self, job: Target) -> None:
        self.recipe.index(job, lambda: self.loaded, lambda stage, done, of: None)


def index_by_ray(
    recipe: BuildRecipe, address: str, workers: int | None, targets: Sequence[Target], _: Progress, done: Done
) -> None:
    """Index all documents on a Ray cluster, the largest file first.

    Raises:
        UsageError: a document is standard input, which workers do not have; or the errors of `RayCluster.run`.
    """
    if any(one.document == "-" for one in targets):
        raise UsageError("--ray: workers cannot read this command's standard input; name a file")
    named = {_whole(one): one for one in targets}
    elsewhere = replace(recipe, quiet=True, model=whole_model(recipe.model))
    cluster = RayCluster(IndexWorker, elsewhere, address, workers)
    for whole, wrong in cluster.run(sorted(named, key=_size)):
        done(named[whole], wrong.replace(whole.document, named[whole].document))


def _whole(target: Target) -> Target:
    """Return a target with absolute paths, which are valid in every process that shares the file system."""
    return Target(os.path.abspath(target.document), target.folder.absolute())


def _size(target: Target) -> int:
    try:
        return Path(target.document).stat().st_size
    except OSError:
        return 0


if TYPE_CHECKING:  # an optional library
    from watchfiles.main import FileChange

SETTLED = 300
"""Milliseconds without a change after which changes are reported."""
LONGEST = 2000
"""Milliseconds after which changes are reported even if further changes follow."""
TICK = 500
"""Milliseconds between two checks whether a watched folder was replaced by another folder of the same name. Without the
check, the system would go on watching the removed folder."""


def refuse_unwatchable(targets: Sequence[Target]) -> None:
    """Raise UsageError if watchfiles is not installed, or if a document is standard input or a device.

    Documents that do not exist are allowed, because they can be written later.
    """
    try:
        import watchfiles  # noqa: F401
    except ImportError:
        raise UsageError("--watch needs watchfiles: pip install 'sparsekv[watch]'") from None
    for target in targets:
        for name in target.joined or (target.document,):
            if name == "-":
                raise UsageError("--watch: standard input does not change; name a file")
            if os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name):
                raise UsageError(f"--watch: {name} is neither a file nor a folder; name one")


def build_and_watch(recipe: BuildRecipe, targets: Sequence[Target]) -> None:
    """Build the documents' indices, and build each again when its text has changed, until Ctrl-C.

    An error of a build is printed, and the document is still watched. If the text was not refused, as on a full disk,
    it is built again at the next change of any file, even if it stays the same. Only an error of the first build of a
    single document is raised. `--force` applies to the first round of builds only.

    Raises:
        SparsekvError: the first build of a single document failed, or the files cannot be watched.
    """
    load, states = cache(recipe.load), dict[Target, str]()
    watched = targets[0].document if len(targets) == 1 else f"{len(targets):,} documents"
    changes = _Changes(targets)
    try:
        while True:
            before = dict(states)
            # A text that changes during its build has another hash in the next round, and is then built again.
            states |= {target: recipe.text_state(target) for target in targets}
            changed = [target for target in targets if states[target] != before.get(target)]
            for target in changed:
                if _build(recipe, target, load, alone=not before and len(targets) == 1):
                    del states[target]
            recipe = replace(recipe, config=replace(recipe.config, force=False))
            if changed:
                note(f"watching {watched}; Ctrl-C ends it", quiet=recipe.quiet)
            changes.wait()
    finally:
        changes.close()


def _build(recipe: BuildRecipe, target: Target, load: Callable[[], LoadedModel], *, alone: bool) -> bool:
    """Build an index and print its path; return whether the same text is to be tried again.

    An error is printed, or raised if `alone` is True. Another attempt may succeed unless the text was refused.
    """

    def index() -> None:
        with progress(quiet=recipe.quiet) as show:
            recipe.index(target, load, show)
        say(str(target.folder))

    if alone:
        index()
    elif (error := _error_of(index)) is not None:
        wrong = describe(error, "build-index")
        named = wrong.startswith(target.document) or wrong.endswith(target.document)
        tell(printable(wrong if named else f"{target.document}: {wrong}"), soft_wrap=True)
        return not isinstance(error, UsageError)
    return False


class _Changes:
    """Waits for changes in the files and folders of documents. Changes between two calls of `wait` are not lost.

    Raises:
        SparsekvError: the system refuses to watch a folder.
    """

    def __init__(self, targets: Sequence[Target]):
        self._names = [os.fspath(name) for target in targets for name in target.joined or (target.document,)]
        self._indices = [os.path.join(os.path.abspath(target.folder), "") for target in targets]
        self._folders, self._files = set[str](), set[str]()
        self._streams: list[Generator[set[FileChange], None, None]] = []
        self._seen: list[object] = []
        self._open()

    def wait(self) -> None:
        """Return once a file has changed, or a watched folder was replaced."""
        while True:
            changed = [bool(next(stream)) for stream in self._streams]
            if self._identities() != self._seen:
                self.close()
                self._open()
                return
            if any(changed):
                return
            if not self._streams:
                time.sleep(TICK / 1000)

    def close(self) -> None:
        """Stop watching."""
        for stream in self._streams:
            stream.close()
        self._streams = []

    def _open(self) -> None:
        from watchfiles import watch

        self._folders, self._files = self._places()
        self._seen = self._identities()
        parents = {os.path.dirname(path) for path in self._files}
        ways = (self._folders, self._counts_below, True), (parents, self._is_named, False)
        for paths, counts, recursive in ways:
            there = [path for path in sorted(paths) if os.path.isdir(path)]
            if not there:
                continue
            stream = watch(
                *there,
                watch_filter=counts,
                debounce=LONGEST,
                step=SETTLED,
                rust_timeout=TICK,
                yield_on_timeout=True,
                recursive=recursive,
                ignore_permission_denied=True,
            )
            self._streams.append(stream)
            try:
                next(stream)  # begins the watch
            except (OSError, RuntimeError) as error:
                raise SparsekvError(
                    f"--watch: cannot watch {there[0]}: {error}; name a smaller folder, or raise "
                    "fs.inotify.max_user_watches"
                ) from None

    def _places(self) -> tuple[set[str], set[str]]:
        """Return the paths of the folders and of the files to watch. A name that does not exist may become a file.

        Links in a file's folder are resolved. A file that is itself a link has two paths: its own, and that of the file
        that it leads to.
        """
        folders, files = set[str](), set[str]()
        for name in self._names:
            if os.path.isdir(name):
                folders.add(os.path.abspath(name))
            elif is_glob(name):
                folders.add(os.path.abspath(folder_of_glob(name)))
            else:
                folder, base = os.path.split(os.path.abspath(name))
                files |= {os.path.join(os.path.realpath(folder), base), os.path.realpath(name)}
        return folders, files

    def _identities(self) -> list[object]:
        """Return the watched paths, and device and inode of each watched folder; None for a folder that does not
        exist."""
        folders, files = self._places()
        watched = sorted({*folders, *map(os.path.dirname, files)})
        return [sorted(folders), sorted(files), *map(_identity, watched)]

    def _counts_below(self, change: object, path: str) -> bool:
        """Whether a changed path below a watched folder may matter to a document.

        It does not matter if it is in an index or if a part of it is hidden; a .gitignore does not count as hidden.
        """
        if any(os.path.join(path, "").startswith(index) for index in self._indices):
            return False
        # A folder that is hidden in one watched folder may itself be named.
        below = [Path(path).relative_to(folder).parts for folder in self._folders if Path(path).is_relative_to(folder)]
        return any(not any(map(_is_left_out, parts)) for parts in below)

    def _is_named(self, change: object, path: str) -> bool:
        return path in self._files


def _is_left_out(name: str) -> bool:
    """Whether a file or folder of this name in a watched folder is no part of a document's text."""
    return (name[0] == "." and name != IGNORE_FILE) or name.endswith(ENDING)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
