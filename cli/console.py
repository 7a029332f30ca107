"""What a person sees while a command runs: notes and progress, on stderr, the bars only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

stderr = Console(stderr=True, highlight=False)


def note(text: str, *, quiet: bool) -> None:
    """One line on stderr, unless the person asked for quiet."""
    if not quiet:
        stderr.print(text, markup=False, soft_wrap=True)


def note_plain(document: str, plain: dict[str, int], *, quiet: bool) -> None:
    """That special tokens stand in a text, and how often each; nothing where none does."""
    if plain:
        told = "; ".join(f"{token}, {'once' if times == 1 else f'{times:,} times'}" for token, times in plain.items())
        note(
            f"{document} contains special tokens of the model ({told}): read as plain text; --special-tokens gives "
            "them their meaning",
            quiet=quiet,
        )


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function of (stage, done, of) that draws one bar a stage; it draws nothing where no one is watching."""
    bars = Progress(
        TextColumn("{task.description:14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=stderr,
        disable=quiet or not stderr.is_terminal,
    )
    tasks = {}

    def show(stage: str, done: int, of: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=of)
        bars.update(tasks[stage], completed=done)

    with bars:
        yield show
