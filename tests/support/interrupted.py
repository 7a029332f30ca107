"""Builds that are killed before their first, second, third, ... file operation.

A build names files relative to a descriptor of its folder. Therefore operations on relative names count, too.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


class Killed(BaseException):
    """Exception in place of a kill: from its first raise on, every operation on the folder raises it."""


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
        # as if the process had been killed while it wrote the file that it is about to rename
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
    """Yield folders as `build(folder)` leaves them when it is killed before its first, second, ... file operation.

    With `every` above 1, kills are before every `every`-th operation only. Each build starts from a copy of `base`, or
    from nothing. The last folder is that of a build that was killed before its last operation. Fails if there were not
    more than `least` operations, because then the kills missed the build.
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
