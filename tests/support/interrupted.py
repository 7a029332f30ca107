"""Builds that are killed before each of their file operations in turn, one operation later every time.

An index's folder is held open and its files are named below its descriptor, so an operation on a bare name is one too.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


class Killed(BaseException):
    """Stands for the end of the process: from here on every operation on the folder raises it."""


@dataclass
class _Countdown:
    folder: Path
    operations: int


_running: list[_Countdown] = []
_hooked = False


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if not _running or event not in OPERATIONS or not _is_below(_running[0].folder, str(arguments[0])):
        return
    _running[0].operations -= 1
    if _running[0].operations > 0:
        return
    if event == "os.rename" and _running[0].operations == 0:
        # as if the kill had come in the middle of writing the file that is about to be renamed
        for half_written in _running[0].folder.rglob(Path(str(arguments[0])).name):
            os.truncate(half_written, half_written.stat().st_size // 2)
    raise Killed


def _is_below(folder: Path, name: str) -> bool:
    return name.startswith(str(folder)) or (not name.startswith("/") and not name.isdigit())


def _is_killed(build: Callable[[Path], object], folder: Path, operation: int) -> bool:
    global _hooked
    if not _hooked:
        # An audit hook sees every file operation of Python's, and stays for good: it looks at `_running` first.
        sys.addaudithook(_watch)
        _hooked = True
    _running.append(_Countdown(folder, operation))
    try:
        build(folder)
    except Killed:
        return True
    finally:
        _running.clear()
    return False


def interrupted_builds(
    root: Path, build: Callable[[Path], object], base: Path | None = None, *, least: int = 20, every: int = 1
) -> Iterator[Path]:
    """Folders as left by `build(folder)` when it is killed before its first, second, ... file operation, or before one
    in so many of them.

    Each starts from a copy of `base`, or from nothing; the last one was killed before the build's last operation. Fails
    when there were not more than `least` operations, for then it saw no build.
    """
    operation = 1
    while True:
        folder = root / f"{operation:03d}.skv"
        if base is not None:
            shutil.copytree(base, folder)
        if not _is_killed(build, folder, operation):
            assert operation > least
            return
        yield folder
        operation += every
