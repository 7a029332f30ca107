"""`/trace`: what the answer to the last question attended to."""

from dataclasses import replace
from pathlib import Path

from sparsekv.cli.chatting.session import Session
from sparsekv.cli.chatting.slash import slash
from sparsekv.cli.common.console import note
from sparsekv.cli.tracing.output import describe_size, refuse_unwritable, write
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.tracing.trace import TracedIndex


@slash("/trace FILE.html", "ask the last question again, and write a page of what its answer attends to")
def trace(session: Session, argument: str) -> None:
    """With `--truth`, over a second cache of the document; the talk before the question is a part of it."""
    talk = session.talk
    if not argument:
        raise UsageError("/trace: give the page a name, such as /trace out.html")
    if not talk.turns:
        raise UsageError("/trace: nothing was asked yet; ask first")
    output = Path(argument).expanduser()
    refuse_unwritable(output, "/trace")
    traced = TracedIndex(talk.index, replace(talk.config, placement="device"))
    answer, document = traced.trace(talk.last_asked(), len(talk.turns[-1].answer), truth=True)
    size = write({**document, "question": session.asked}, output)
    if answer.ids != talk.turns[-1].answer:
        note("asked again, it was answered otherwise", quiet=session.quiet)
    note(f"{output}: {describe_size(document, size)}", quiet=session.quiet)
