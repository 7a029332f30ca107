"""Write a trace to the file that was named, in the form of its ending."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsekv.cli.common.console import say
from sparsekv.cli.common.printable import json_text
from sparsekv.formats.errors import SparsekvError, UsageError

Write = Callable[[dict[str, Any], Path], None]


def write_json(document: dict[str, Any], path: Path) -> None:
    """Write a trace as JSON; raises OSError."""
    path.write_text(json_text(document) + "\n", encoding="utf-8")


WRITERS: dict[str, Write] = {".json": write_json}
"""What writes a trace, by the ending of the file's name; it may raise OSError."""


def refuse_unwritable(output: Path | None) -> None:
    """Raise UsageError for a file whose folder is missing, or whose ending no trace has."""
    if output is None:
        return
    if output.suffix.lower() not in WRITERS:
        raise UsageError(f"-o {output}: a trace is written to a file that ends in {' or '.join(WRITERS)}")
    if not os.path.isdir(output.absolute().parent):
        raise UsageError(f"-o {output}: its folder does not exist; make it first")
    if os.path.isdir(output):
        raise UsageError(f"-o {output} is a folder; give the name of a file in it")
    if len(os.fsencode(output.name)) > os.pathconf(output.absolute().parent, "PC_NAME_MAX"):
        raise UsageError(f"-o {output}: the name is too long; give a shorter one")


def write(document: dict[str, Any], output: Path) -> int:
    """Write a trace, whole or not at all, and return its size in bytes; SparsekvError if it cannot be written."""
    unfinished = output.with_name(f".trace-{os.getpid()}{output.suffix}")
    try:
        WRITERS[output.suffix.lower()](document, unfinished)
        size = unfinished.stat().st_size
        os.replace(unfinished, output)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SparsekvError(f"cannot write the trace {output}: {reason}; give -o another name") from None
    finally:
        with suppress(OSError):
            unfinished.unlink()
    return size


def say_json(document: dict[str, Any]) -> int:
    """Print a trace as JSON to stdout, and return its size in bytes."""
    text = json_text(document)
    say(text)
    return len(text.encode())


def describe_size(document: dict[str, Any], size: int | None) -> str:
    """One line: how much was recorded, and how many bytes it takes where it was written or printed."""
    counts = len(document["answer_tokens"]), len(document["layers"]), document["kv_heads"]
    recorded = "{:,} records of {:,} tokens, {} layers and {} KV heads".format(len(document["records"]), *counts)
    return f"{recorded}, {size:,} bytes" if size is not None else f"{recorded}; -o FILE or --json keeps them"


def describe_without(found: dict[str, Any]) -> str:
    """One line: the answer without some passages, and what the first answer is worth then."""
    shown, hidden = found["log_probability"]
    return (
        f"without: {' '.join(found['answer'].split())} (log-probability of the first answer {shown:.2f}, without "
        f"{hidden:.2f})"
    )
