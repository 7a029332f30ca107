"""Note an --encoding that the user typed for files that have encodings of their own."""

from collections.abc import Sequence
from typing import Any

from sparsekv.cli.common.console import note
from sparsekv.cli.configuring.sources import on_command_line
from sparsekv.formats.documents.extracted import DOCX, PDF, kind_of


def note_idle_encoding(ctx: Any, documents: Sequence[str], *, quiet: bool) -> None:
    """Print a note if --encoding is on the command line and all of the documents are PDF or DOCX files."""
    if documents and on_command_line(ctx, "encoding") and all(kind_of(one) in (PDF, DOCX) for one in documents):
        told = f"--encoding {ctx.params['encoding']} has no effect on {documents[0]}"
        note(f"{told}: PDF and DOCX files have encodings of their own", quiet=quiet)
