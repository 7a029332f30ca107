"""The commands of every chat, one function each."""

from pathlib import Path

from sparsekv.cli.answering.session import refuse_unsavable, save_session
from sparsekv.cli.chatting.session import Session, describe
from sparsekv.cli.chatting.slash import COMMANDS, slash
from sparsekv.cli.common.console import note
from sparsekv.cli.common.small_budgets import note_small_budgets
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.selection.registry import DENSE, choose_methods

KEYS = {
    "// ...": "a question that begins with /",
    "!multi": "begin a question of several lines; !end ends it (pasted lines are one question)",
    "Ctrl-C": "stop an answer, or drop what is typed",
    "Ctrl-D": "leave",
}


@slash("/help", "list these commands")
def show_help(session: Session, argument: str) -> None:
    told = {one.usage: one.help for one in COMMANDS.values()} | KEYS
    width = max(map(len, told)) + 2
    for usage, meaning in told.items():
        note(f"{usage:<{width}}{meaning}", quiet=False)


@slash("/save NAME.skv", "save the document and the whole talk as a new index")
def save(session: Session, argument: str) -> None:
    talk = session.talk
    if not argument:
        raise UsageError("/save: give the new index a name, such as /save talk.skv")
    if not talk.turns:
        raise UsageError("/save: nothing was asked yet, and the document is saved already; ask first")
    folder = Path(argument).expanduser()
    refuse_unsavable(talk.index.artifact, folder, session.dtype, "/save")
    encoding = {"raw": talk.raw, "special_tokens": talk.special_tokens}
    save_session(talk.index, folder, talk.turns, **encoding, quiet=session.quiet)


@slash("/method NAME", "answer with another method, at its own budget or that of /budget; alone: list them")
def method(session: Session, argument: str) -> None:
    if argument:
        config = session.choices.other_method(session.talk.config, argument)
        own = ", its own budget" if session.choices.budget is None else ""
        session.switch(config, "" if isinstance(config.attention, Dense) else f"{own}; /budget B changes that")
        return
    usable = choose_methods([], list(session.choices.artifact.manifest.methods))
    note(f"{describe(session.talk.config)}; there are: {', '.join([*usable, DENSE])}", quiet=False)


@slash("/budget B", "attend to another share (5%, 0.05) or number of the document's tokens")
def budget(session: Session, argument: str) -> None:
    if argument:
        session.switch(session.choices.other_budget(session.talk.config, argument))
        session.choices.budget = session.talk.config.budget
        note_small_budgets([session.talk.config.budget], quiet=session.quiet)
    else:
        note(describe(session.talk.config), quiet=False)


@slash("/stats", "print times and the share of keys and values read after each answer, or no longer")
def stats(session: Session, argument: str) -> None:
    if argument not in ("", "on", "off"):
        raise UsageError(f"/stats {argument}: write /stats, /stats on or /stats off")
    session.stats = argument == "on" if argument else not session.stats
    note(f"stats are {'on' if session.stats else 'off'}", quiet=session.quiet)


@slash("/forget", "drop the talk so far, and keep the document")
def forget(session: Session, argument: str) -> None:
    turns = len(session.talk.turns)
    session.talk.forget()
    note(f"forgot {turns} question{'' if turns == 1 else 's'}", quiet=session.quiet)


@slash("/quit", "leave")
def leave(session: Session, argument: str) -> None:
    session.left = True
