"""The page of a trace: the document lit by what an answer attended to."""

from pathlib import Path
from typing import Any

from sparsekv.cli.pages.packed_trace import packed_trace
from sparsekv.cli.pages.page import Page, write_page

STYLES = ("trace.css", "trace_panel.css", "trace_always.css")
SCRIPTS = (
    "bytes.js",
    "trace_always.js",
    "trace_data.js",
    "trace_shares.js",
    "trace_command.js",
    "trace_document.js",
    "trace_map.js",
    "trace_answer.js",
    "trace_heads.js",
    "trace_numbers.js",
    "trace_list.js",
    "trace_search.js",
    "trace_keys.js",
    "trace.js",
)


def write_trace_page(document: dict[str, Any], path: Path) -> int:
    """Write the page of a trace, as `sparsekv trace --json` prints it, and give its size in bytes.

    Raises:
        UsageError: the name is not possible, or its folder missing.
        SparsekvError: the file is there and no page of ours, or cannot be written.
    """
    title = f"{document['question']} \u2013 sparsekv trace"
    return write_page(Page(title, packed_trace(document), STYLES, SCRIPTS), path, "--output")
