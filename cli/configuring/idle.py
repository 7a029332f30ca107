"""Refuse an --encoding that the user typed for files that have encodings of their own."""

from collections.abc import Sequence
from typing import Any

from sparsekv.cli.configuring.sources import on_command_line
from sparsekv.formats.documents.extracted import DOCX, PDF, kind_of
from sparsekv.formats.errors import UsageError


def refuse_idle_encoding(ctx: Any, documents: Sequence[str]) -> None:
    """Raise UsageError if --encoding is on the command line and all of the documents are PDF or DOCX files."""
    if documents and on_command_line(ctx, "encoding") and all(kind_of(one) in (PDF, DOCX) for one in documents):
        told = f"--encoding {ctx.params['encoding']} has no effect on {documents[0]}"
        raise UsageError(f"{told}: PDF and DOCX files have encodings of their own; leave it out")
