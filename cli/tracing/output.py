"""Write a trace to the file that was named, in the form of its ending."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsekv.cli.common.console import say
from sparsekv.cli.common.printable import json_text
from sparsekv.cli.pages.page import refuse_impossible_name, refuse_other_file, replace_file
from sparsekv.cli.pages.trace import write_trace_page
from sparsekv.formats.errors import SparsekvError, UsageError

START = '{"version": '
"""What a trace's JSON begins with, by which one that may be overwritten is known."""


def write_json(document: dict[str, Any], path: Path) -> int:
    """Write a trace as JSON, whole or not at all, and return its size in bytes; SparsekvError if it cannot be."""
    text = (json_text(document) + "\n").encode()
    try:
        replace_file(path, text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SparsekvError(f"cannot write the trace {path}: {reason}; give --output another name") from None
    return len(text)


LARGEST_DIFFERENCE = 700.0  # the largest difference of log-probabilities whose exponential is a number
WRITERS: dict[str, Callable[[dict[str, Any], Path], int]] = {".html": write_trace_page, ".json": write_json}
"""What writes a trace and returns its size in bytes, by the ending of the file's name."""


def refuse_unwritable(output: Path | None, option: str = "--output") -> None:
    """Raise UsageError for a file whose folder is missing, or whose ending no trace has; SparsekvError for what is none
    of ours and would be replaced."""
    if output is None:
        return
    ending = output.suffix.lower()
    if ending not in WRITERS:
        raise UsageError(f"{option} {output}: a trace is written to a file that ends in {' or '.join(WRITERS)}")
    refuse_impossible_name(output, option)
    if ending == ".html":
        refuse_other_file(output, option)
    else:
        refuse_other_file(output, option, "trace", START)


def write(document: dict[str, Any], output: Path) -> int:
    """Write a trace in the form of the file's ending, and return its size in bytes; raises what its writer raises."""
    return WRITERS[output.suffix.lower()](document, output)


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
    change = math.exp(min(abs(hidden - shown), LARGEST_DIFFERENCE))
    likely = f"{change:,.3g} times {'less' if hidden < shown else 'more'} likely"
    return (
        f"without: {' '.join(found['answer'].split())} (the first answer is {likely} then: its log-probability is "
        f"{hidden:.2f} instead of {shown:.2f})"
    )
