"""The open folder of an index: its lock and marker, and files that get their names once they are complete and on
disk."""

import contextlib
import errno
import os
import platform
import re
import secrets
import stat
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from sparsekv.formats.errors import ArtifactError


def sync_path(path: Path) -> None:
    """fsync a file, or a folder after a file in it was created or renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LOCK = ".lock"


def acquire_lock(folder: Path) -> FileLock:
    """Acquire the lock of an existing folder; the caller releases it.

    Raises:
        ArtifactError: another process holds it.
        OSError: the folder cannot be written, or the lock file is a link.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ArtifactError(f"{folder} is being built by another process; wait for it or stop it") from None
    return lock


_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class SharedFile:
    """A file as another process finds it: its path below the index's folder, and which file that must be.

    Its numbers say which only on one machine. There, all processes see what each of them has written at once; on
    another, the first one could hash what it still has of the file in its own memory.
    """

    path: str
    machine: str
    device: int
    inode: int

    @staticmethod
    def of(path: str, descriptor: int) -> "SharedFile":
        """An open file at a path."""
        found = os.fstat(descriptor)
        return SharedFile(path, _this_machine(), found.st_dev, found.st_ino)

    def check(self, descriptor: int) -> None:
        """Raise FileNotFoundError if an open file is another one."""
        if SharedFile.of(self.path, descriptor) != self:
            raise FileNotFoundError(errno.ENOENT, "another file lies there", self.path)


class OpenFile:
    """A file that is open for writing at any place and from any thread."""

    descriptor: int

    def write(self, data: bytes | memoryview, place: int) -> None:
        """Write all of some bytes from a place on."""
        left = memoryview(data).cast("B")
        while left:
            written = os.pwrite(self.descriptor, left, place)
            left, place = left[written:], place + written


class UnfinishedFile(OpenFile):
    """A file with a temporary name, until it is kept or discarded.

    Args:
        path: its own path below the index's folder, once it is kept.
    """

    def __init__(self, parent: int, path: str):
        self._above, _, self._name = path.rpartition("/")
        self._temporary = f"{self._name}.{secrets.token_hex(4)}.tmp"
        self._parent, self._open = os.dup(parent), True
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self.descriptor = os.open(self._temporary, flags, 0o666, dir_fd=parent)
        except OSError:
            os.close(self._parent)
            raise

    @property
    def shared(self) -> SharedFile:
        """A handle by which another process opens the file."""
        return SharedFile.of(f"{self._above}/{self._temporary}", self.descriptor)

    def keep(self) -> None:
        """Give it its own name, once it is on disk."""
        os.fsync(self.descriptor)
        os.rename(self._temporary, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        os.fsync(self._parent)
        self._close()

    def discard(self) -> None:
        """Remove it, if it was not kept."""
        try:
            with contextlib.suppress(OSError):
                if self._open:
                    os.unlink(self._temporary, dir_fd=self._parent)
        finally:
            self._close()

    def _close(self) -> None:
        # Once: after that the numbers may be those of other files, also where closing failed.
        if not self._open:
            return
        self._open = False
        try:
            os.close(self.descriptor)
        finally:
            os.close(self._parent)


class JoinedFile(OpenFile):
    """The unfinished file of another process, which alone names or removes it.

    It is never created here: what a process writes that outlives the other goes to that one's file, which the next
    build removes, and to no file that has its name.

    Args:
        name: its temporary name there.
        shared: which file that must be.

    Raises:
        OSError: it cannot be opened, or it is another one.
    """

    def __init__(self, parent: int, name: str, shared: SharedFile):
        # Without O_NONBLOCK, opening a pipe waits for a reader.
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptor = os.open(name, flags, dir_fd=parent)
        try:
            shared.check(self.descriptor)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Write no more to it."""
        os.close(self.descriptor)


def _this_machine() -> str:
    """An id that differs between two machines, and between two boots of one."""
    try:
        return f"{platform.node()} {_BOOT.read_text(encoding='ascii').strip()}"
    except OSError:  # a system that does not tell its start
        return platform.node()


_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY = re.compile(r"(.+)\.[0-9a-f]{8}\.tmp")


class Folder:
    """An open folder. File names are those of `formats.index.schema`, or of files at its top.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def open(self, name: str) -> int:
        """Open a plain file for reading; returns its descriptor, which the caller closes.

        Raises:
            OSError: it is missing, cannot be read, or is a link, a pipe or a folder.
        """
        with self._parent(name) as (parent, last):
            try:
                # Without O_NONBLOCK, opening a pipe waits for a writer.
                descriptor = os.open(last, _READ | os.O_NONBLOCK, dir_fd=parent)
            except OSError as error:
                raise _not_plain(name) if error.errno == errno.ELOOP else error from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _not_plain(name)
        return descriptor

    def read(self, name: str, most: int) -> bytes:
        """A file's bytes, at most `most`. Raises OSError as `open` does, and for a larger file."""
        with os.fdopen(self.open(name), "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", name)
        return data

    def names(self) -> list[str]:
        """Sorted names of everything at its top."""
        return sorted(os.listdir(self._descriptor))

    def link(self, descriptor: int, name: str) -> None:
        """Hard-link an open file here. Raises OSError where the disk cannot, or the file has lost its last name."""
        with self._parent(name, make=True) as (parent, last):
            os.link(f"/proc/self/fd/{descriptor}", last, dst_dir_fd=parent, follow_symlinks=True)

    def begin(self, name: str) -> UnfinishedFile:
        """Begin a file under a temporary name beside its own. Creates its folder if missing; OSError if it fails."""
        with self._parent(name, make=True) as (parent, _):
            return UnfinishedFile(parent, name)

    def join(self, shared: SharedFile) -> JoinedFile:
        """Open a file that another process has begun here. Raises OSError where it is not to be found."""
        with self._parent(shared.path) as (parent, last):
            return JoinedFile(parent, last, shared)

    def write(self, name: str, data: Iterable[bytes | memoryview]) -> None:
        """Write a file from pieces of bytes atomically: afterwards it is whole or as before, whatever happens. Creates
        its folder if missing.

        Raises:
            OSError: it could not be written; the attempt leaves nothing.
        """
        file = self.begin(name)
        try:
            place = 0
            for piece in data:
                file.write(piece, place)
                place += len(piece)
            file.keep()
        except BaseException:
            file.discard()
            raise

    def remove(self, names: Iterable[str], leftovers_of: Iterable[str] = ()) -> None:
        """Remove plain files, temporary files that a dead process left of these or of `leftovers_of`, and folders that
        are then empty."""
        gone = set(names)
        for above in {name.rpartition("/")[0] for name in (*gone, *leftovers_of)}:
            try:
                self._remove_from(above, gone, {*gone, *leftovers_of})
            except FileNotFoundError:
                continue
            if above:
                with contextlib.suppress(OSError):
                    os.rmdir(above, dir_fd=self._descriptor)

    def _remove_from(self, above: str, gone: set[str], written: set[str]) -> None:
        beginning = f"{above}/" if above else ""
        with self._parent(beginning) as (parent, _):
            for found in os.listdir(parent):
                temporary = _TEMPORARY.fullmatch(found)
                ours = beginning + found in gone or (temporary and beginning + temporary[1] in written)
                if ours and stat.S_ISREG(os.stat(found, dir_fd=parent, follow_symlinks=False).st_mode):
                    os.unlink(found, dir_fd=parent)

    @contextmanager
    def _parent(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Descriptor of the folder that contains a name, and the last part of the name; `make` creates the folder."""
        above, _, last = name.rpartition("/")
        if not above:
            yield self._descriptor, last
            return
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(above, dir_fd=self._descriptor)
        try:
            descriptor = os.open(above, _READ | os.O_DIRECTORY, dir_fd=self._descriptor)
        except NotADirectoryError:
            raise _not_plain(name) from None
        try:
            yield descriptor, last
        finally:
            os.close(descriptor)


def _not_plain(name: str) -> OSError:
    return OSError(errno.EINVAL, "a link, a pipe or a folder lies where a plain file belongs", name)


MARKER = ".sparsekv"
_MARK = b"An index of sparsekv lies in this folder: builds replace and remove the files that its manifest names.\n"


def is_marked(folder: Folder) -> bool:
    """Whether a folder has the marker of an index, finished or not."""
    try:
        return folder.read(MARKER, len(_MARK)) == _MARK
    except OSError:
        return False


def mark(folder: Folder) -> None:
    """Write the marker into a folder if it is missing. Raises OSError where it cannot be written."""
    if not is_marked(folder):
        folder.write(MARKER, [_MARK])
