"""Access an index's folder by its open descriptor: its lock, its marker, and files that are written atomically.

A file is written under a temporary name, and gets its own name once it is complete and on disk.
"""

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
    """Call fsync on a file, or on a folder in which a file was created or renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LOCK = ".lock"


def acquire_lock(folder: Path) -> FileLock:
    """Acquire the lock of an existing folder. The caller releases it.

    Raises:
        ArtifactError: another process holds the lock.
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
    """A handle through which another process on the same machine opens a file: path, machine, device and inode.

    Device and inode identify a file only on one machine. Only there do all processes see each other's writes at once:
    across machines, the first process could hash outdated pages of its own page cache.
    """

    path: str
    machine: str
    device: int
    inode: int

    @staticmethod
    def of(path: str, descriptor: int) -> "SharedFile":
        """Make the handle of an open file at a path below the index's folder."""
        found = os.fstat(descriptor)
        return SharedFile(path, _this_machine(), found.st_dev, found.st_ino)

    def check(self, descriptor: int) -> None:
        """Raise FileNotFoundError if an open file is not the file of this handle."""
        if SharedFile.of(self.path, descriptor) != self:
            raise FileNotFoundError(errno.ENOENT, "another file is at this path", self.path)


class OpenFile:
    """A file that any thread can write at any offset."""

    descriptor: int

    def write(self, data: bytes | memoryview, place: int) -> None:
        """Write all bytes of `data` at the offset `place`."""
        left = memoryview(data).cast("B")
        while left:
            written = os.pwrite(self.descriptor, left, place)
            left, place = left[written:], place + written


class UnfinishedFile(OpenFile):
    """A new file that has a temporary name until it is kept or discarded.

    Args:
        parent: descriptor of the folder that contains it.
        path: the file's final path below the index's folder, which `keep` gives to the file.
        number: 8 hex digits of the temporary name; random by default.
        found: True: open the file that an interrupted build left under this temporary name. False: create the file.

    Raises:
        OSError: the file cannot be created or opened, or the file found is not a regular file with a single name.
    """

    def __init__(self, parent: int, path: str, number: str | None = None, *, found: bool = False):
        self._above, _, self._name = path.rpartition("/")
        self._temporary = f"{self._name}.{number or secrets.token_hex(4)}.tmp"
        self._parent, self._open = os.dup(parent), True
        # Without O_NONBLOCK, opening a pipe for reading and writing could wait.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_NONBLOCK if found else os.O_CREAT | os.O_EXCL)
        try:
            self.descriptor = os.open(self._temporary, flags, 0o666, dir_fd=parent)
        except OSError:
            os.close(self._parent)
            raise
        status = os.fstat(self.descriptor)
        # A second name could be that of a file outside the index, which must not change.
        if found and (not stat.S_ISREG(status.st_mode) or status.st_nlink != 1):
            self._close()
            raise _not_plain(path)

    @property
    def shared(self) -> SharedFile:
        """Handle with which another process opens the file under its temporary name."""
        return SharedFile.of(f"{self._above}/{self._temporary}", self.descriptor)

    def keep(self) -> None:
        """Flush the file to disk and rename it to its own name."""
        os.fsync(self.descriptor)
        os.rename(self._temporary, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        os.fsync(self._parent)
        self._close()

    def discard(self) -> None:
        """Remove the file unless it was kept or left. Errors of the removal are ignored."""
        try:
            with contextlib.suppress(OSError):
                if self._open:
                    os.unlink(self._temporary, dir_fd=self._parent)
        finally:
            self._close()

    def leave(self) -> None:
        """Close the file and leave it under its temporary name, for the next build."""
        self._close()

    def _close(self) -> None:
        # Close each descriptor only once, even if closing fails: its number may belong to another file afterwards.
        if not self._open:
            return
        self._open = False
        try:
            os.close(self.descriptor)
        finally:
            os.close(self._parent)


class JoinedFile(OpenFile):
    """The unfinished file of another process, opened here for writing. Only the other process renames or removes it.

    This process never creates the file. If this process outlives the other one, it still writes to the temporary file,
    which the next build removes, and never to a finished file.

    Args:
        parent: descriptor of the folder that contains the file.
        name: the file's temporary name in this folder.
        shared: the handle that the opened file must match.

    Raises:
        OSError: the file cannot be opened, or does not match the handle.
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
        """Close the file; nothing more can be written to it."""
        os.close(self.descriptor)


def _this_machine() -> str:
    """Return an id that differs between machines, and between two boots of one machine."""
    try:
        return f"{platform.node()} {_BOOT.read_text(encoding='ascii').strip()}"
    except OSError:  # not Linux: there is no boot id
        return platform.node()


_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY = re.compile(r"(.+)\.([0-9a-f]{8})\.tmp")


class Folder:
    """The open folder of an index.

    Methods take names of files relative to this folder: `FILE`, or `SUBFOLDER/FILE`, such as
    `context/layer_000.safetensors`.

    Raises:
        OSError: the folder does not exist or cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def open(self, name: str) -> int:
        """Open a regular file for reading, and return its descriptor, which the caller closes.

        Raises:
            OSError: the file is missing, cannot be read, or is a link, a pipe or a folder.
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

    def read(self, name: str, limit: int) -> bytes:
        """Read a whole file. Raises OSError as `open` does, and for a file of more than `limit` bytes."""
        with os.fdopen(self.open(name), "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB", name)
        return data

    def names(self) -> list[str]:
        """List the names of the files and folders directly inside this folder, sorted."""
        return sorted(os.listdir(self._descriptor))

    def link(self, descriptor: int, name: str) -> None:
        """Hard-link an open file into this folder under a name.

        Raises:
            OSError: the file system has no hard links, the name is taken, or the open file no longer has a name.
        """
        with self._parent(name, make=True) as (parent, last):
            os.link(f"/proc/self/fd/{descriptor}", last, dst_dir_fd=parent, follow_symlinks=True)

    def begin(self, name: str, number: str | None = None) -> UnfinishedFile:
        """Create a file under a temporary name, and its subfolder if that is missing. Raises OSError on failure.

        Args:
            number: 8 hex digits of the temporary name; random by default. A file or link of that name is replaced.
        """
        with self._parent(name, make=True) as (parent, last):
            with contextlib.suppress(FileNotFoundError):
                if number is not None:
                    os.unlink(f"{last}.{number}.tmp", dir_fd=parent)
            return UnfinishedFile(parent, name, number)

    def continued(self, name: str, number: str) -> UnfinishedFile:
        """Open the unfinished file that an interrupted build left under a temporary name. Raises OSError on failure.

        If that build has already renamed the file to its own name, the file gets its temporary name back.
        """
        with self._parent(name) as (parent, last):
            temporary = f"{last}.{number}.tmp"
            with contextlib.suppress(FileNotFoundError):
                os.stat(temporary, dir_fd=parent, follow_symlinks=False)
                return UnfinishedFile(parent, name, number, found=True)
            os.rename(last, temporary, src_dir_fd=parent, dst_dir_fd=parent)
            return UnfinishedFile(parent, name, number, found=True)

    def join(self, shared: SharedFile) -> JoinedFile:
        """Open an unfinished file that another process created in this folder. Raises OSError if it is not found."""
        with self._parent(shared.path) as (parent, last):
            return JoinedFile(parent, last, shared)

    def write(self, name: str, data: Iterable[bytes | memoryview]) -> None:
        """Write a file atomically from pieces of bytes, and create its subfolder if that is missing.

        After an interruption the file is either complete or as before.

        Raises:
            OSError: the file could not be written; the temporary file is removed.
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

    def remove(self, names: Iterable[str], leftovers_of: Iterable[str] = (), kept_number: str | None = None) -> None:
        """Remove regular files, leftover temporary files, and subfolders that are then empty.

        Args:
            names: files to remove, with the temporary files of their names.
            leftovers_of: files that stay; only their temporary files, which a dead process left, are removed.
            kept_number: temporary files with these 8 hex digits in their names are not removed; None: all are removed.
        """
        gone = set(names)
        for above in {name.rpartition("/")[0] for name in (*gone, *leftovers_of)}:
            try:
                self._remove_from(above, gone, {*gone, *leftovers_of}, kept_number)
            except FileNotFoundError:
                continue
            if above:
                with contextlib.suppress(OSError):
                    os.rmdir(above, dir_fd=self._descriptor)

    def _remove_from(self, above: str, gone: set[str], written: set[str], kept_number: str | None) -> None:
        beginning = f"{above}/" if above else ""
        with self._parent(beginning) as (parent, _):
            for found in os.listdir(parent):
                temporary = _TEMPORARY.fullmatch(found)
                left = temporary and temporary[2] != kept_number and beginning + temporary[1] in written
                ours = beginning + found in gone or left
                if ours and stat.S_ISREG(os.stat(found, dir_fd=parent, follow_symlinks=False).st_mode):
                    os.unlink(found, dir_fd=parent)

    @contextmanager
    def _parent(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield an open descriptor of the folder that holds the file `name`, and the file's name in that folder.

        Args:
            make: create the folder if it is missing.
        """
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
    """Whether a folder has the marker file, which a build writes before all other files except the lock."""
    try:
        return folder.read(MARKER, len(_MARK)) == _MARK
    except OSError:
        return False


def mark(folder: Folder) -> None:
    """Write the marker file into a folder unless it is there. Raises OSError if it cannot be written."""
    if not is_marked(folder):
        folder.write(MARKER, [_MARK])
