"""The open folder of an index: files are reached by plain names below it, never through a link.

Whoever made an index may have put links, pipes or folders where files belong. So every name is opened relative to the
folder's descriptor, without following links, and anything but a plain file is refused. Only plain files are removed,
and their folders once empty.
"""

import contextlib
import errno
import os
import re
import stat
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsekv.formats.unfinished_file import JoinedFile, SharedFile, UnfinishedFile

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY = re.compile(r"(.+)\.[0-9a-f]{8}\.tmp")


class Folder:
    """An open folder. File names are those of `formats.names`, or of files at its top.

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
                if ours and _is_plain(found, parent):
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


def _is_plain(name: str, parent: int) -> bool:
    return stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _not_plain(name: str) -> OSError:
    return OSError(errno.EINVAL, "a link, a pipe or a folder lies where a plain file belongs", name)
