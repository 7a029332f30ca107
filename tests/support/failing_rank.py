"""Program that runs `sparsekv ARGUMENTS` as one rank of several; in one of the ranks a function fails or waits.

The program's arguments are: the number of that rank; the function ("package.module:Class.function" or
"package.module:function"); the name of a function of this file, which is called instead of that function, with it as
the first argument; and the command's arguments.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

import psutil

from sparsekv.formats.errors import UsageError

Does = Callable[..., Any]


def killed(does: Does, *given: Any) -> NoReturn:
    """Kill the process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def refused(does: Does, *given: Any) -> NoReturn:
    """Raise the error of a task that cannot be done."""
    raise UsageError("this layer cannot be indexed; try another")


def unreadable(does: Does, *given: Any) -> NoReturn:
    """Raise the error of a failing disk."""
    raise OSError(5, "input/output error")


def left_alone(does: Does, *given: Any) -> Any:
    """Wait until all other ranks have ended, and then call the function."""
    ends = time.monotonic() + 60
    while len(psutil.Process(os.getppid()).children()) > 1:
        if time.monotonic() > ends:
            raise UsageError("another rank still waits")
        time.sleep(0.05)
    return does(*given)


HOW: dict[str, Callable[..., Any]] = {one.__name__: one for one in (killed, refused, unreadable, left_alone)}


def main(number: str, where: str, how: str, arguments: list[str]) -> None:
    if os.environ["RANK"] == number:
        module, _, path = where.partition(":")
        *above, name = path.split(".")
        owner: Any = import_module(module)
        for one in above:
            owner = getattr(owner, one)
        does = getattr(owner, name)
        setattr(owner, name, lambda *given: HOW[how](does, *given))
    sys.argv = ["sparsekv", *arguments]
    from sparsekv.cli.main import main

    main()


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[6:])  # type: ignore[arg-type]  # without "-m sparsekv.cli"
