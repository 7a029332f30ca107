"""A program: `sparsekv ARGUMENTS` as a rank that fails where it is told to.

Arguments: the number of the rank that fails, where ("package.module:Class.function" or "package.module:function"), how
(the name of a function below), and the command's.
"""

import os
import signal
import sys
from importlib import import_module
from typing import Any, NoReturn

from sparsekv.formats.errors import UsageError


def killed(*given: Any) -> NoReturn:
    """The process is killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def refused(*given: Any) -> NoReturn:
    """What is asked for cannot be done."""
    raise UsageError("this layer cannot be indexed; try another")


def unreadable(*given: Any) -> NoReturn:
    """The disk fails."""
    raise OSError(5, "input/output error")


def main(number: str, where: str, how: str, arguments: list[str]) -> None:
    if os.environ["RANK"] == number:
        module, _, path = where.partition(":")
        *above, name = path.split(".")
        owner: Any = import_module(module)
        for one in above:
            owner = getattr(owner, one)
        setattr(owner, name, {"killed": killed, "refused": refused, "unreadable": unreadable}[how])
    sys.argv = ["sparsekv", *arguments]
    from sparsekv.cli.main import main

    main()


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[6:])  # type: ignore[arg-type]  # without "-m sparsekv.cli"
