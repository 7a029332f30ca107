"""A file under a temporary name until it is whole; other processes of the same machine may write to it meanwhile."""

import contextlib
import errno
import os
import platform
import secrets
from dataclasses import dataclass
from pathlib import Path

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
        parent: descriptor of its folder.
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
        """What another process finds it by."""
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
        parent: descriptor of its folder.
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
    """What differs between two machines, and between two starts of one."""
    try:
        return f"{platform.node()} {_BOOT.read_text(encoding='ascii').strip()}"
    except OSError:  # a system that does not tell its start
        return platform.node()
