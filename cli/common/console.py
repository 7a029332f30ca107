"""Output of the commands: results and tables on stdout; notes, progress lines and progress bars on stderr.

A progress line has an estimate of the time that is left of a stage, from the times of its steps so far.
"""

import csv
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from sparsekv.cli.common.streams import printable

MINUTE = 60.0


class Remaining:
    """Estimates the remaining time of one stage from the times of its steps so far.

    The steps of a dense prefill become slower, because each token attends to all earlier tokens. Therefore the time per
    step is extrapolated linearly from the mean times of the first and the second half of the steps so far. The
    extrapolated time grows at most in proportion to the number of steps.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._of = clock, 0
        self._steps: list[tuple[float, int]] = []

    def show(self, done: int, total: int) -> None:
        """Record that `done` of `total` steps are done. A smaller `done` than before restarts the estimate."""
        if self._steps and done < self._steps[-1][1]:
            self._steps = []
        if not self._steps or done > self._steps[-1][1]:
            self._steps.append((self._clock(), done))
        self._of = total

    def seconds(self) -> float | None:
        """Return the remaining seconds from now on; None before two calls of `show` and after the last step."""
        if len(self._steps) < 2 or self._steps[-1][1] >= self._of:
            return None
        first, middle, last = self._steps[0], self._steps[(len(self._steps) - 1) // 2], self._steps[-1]
        now, place = _pace(middle, last)
        ahead = (last[1] + self._of) / 2
        pace = now
        if middle != first:
            before, earlier = _pace(first, middle)
            slope = max(0.0, (now - before) / (place - earlier))
            pace = min(now + slope * (ahead - place), now * ahead / place)
        return max(0.0, pace * (self._of - last[1]) - (self._clock() - last[0]))

    def told(self) -> str:
        """Return the estimate as text, such as `about 3 min left`; empty without one, or once its time has passed."""
        seconds = self.seconds()
        if not seconds:
            return ""
        return f"about {seconds / MINUTE:.0f} min left" if seconds >= 1.5 * MINUTE else f"about {seconds:.0f} s left"


def _pace(start: tuple[float, int], end: tuple[float, int]) -> tuple[float, float]:
    """Return the seconds per step between two points (seconds, steps), and the steps half-way between them."""
    return (end[0] - start[0]) / (end[1] - start[1]), (start[1] + end[1]) / 2


EVERY = 10.0
"""Seconds between two progress lines."""


_telling: "list[ProgressLines]" = []


def telling() -> "ProgressLines | None":
    """Return the active `ProgressLines`, or None. Only one `ProgressLines` should print at a time."""
    return _telling[-1] if _telling else None


class ProgressLines:
    """A context manager that prints the progress of the current stage every `EVERY` seconds.

    Args:
        tell: prints a line.
        before: the text until the first stage is shown.
    """

    def __init__(self, tell: Callable[[str], None], before: str = "at work"):
        self._tell, self._before, self._ended = tell, before, threading.Event()
        self._stage, self._done, self._of, self._began = "", 0, 0, time.monotonic()
        self._remaining = Remaining()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def show(self, stage: str, done: int, total: int) -> None:
        """Record that `done` of `total` steps of a stage are done."""
        # After the end of a stage, there may be long work without progress. Its time does not count for the stage.
        if stage != self._stage or done >= total:
            self._began = time.monotonic()
        if stage != self._stage:
            self._remaining = Remaining()
        self._remaining.show(done, total)
        self._stage, self._done, self._of = stage, done, total

    def line(self) -> str:
        """Return the progress line to print now."""
        seconds = time.monotonic() - self._began
        if not self._stage:
            return f"{self._before}, {seconds:.0f} s"
        if self._done >= self._of:
            return f"{self._stage}: all {self._of:,}; at work on what follows, {seconds:.0f} s"
        left = self._remaining.told()
        return f"{self._stage}: {self._done:,} of {self._of:,}, {seconds:.0f} s{'; ' * bool(left)}{left}"

    def __enter__(self) -> "ProgressLines":
        self._thread.start()
        _telling.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _telling.remove(self)
        self._ended.set()
        self._thread.join()

    @contextmanager
    def instead(self, what: str) -> Iterator[None]:
        """Within the context, print `what` instead of the current stage."""
        kept = self._before, self._stage, self._done, self._of
        self._before, self._stage, self._began = what, "", time.monotonic()
        try:
            yield
        finally:
            self._before, self._stage, self._done, self._of = kept
            self._began = time.monotonic()

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            self._tell(self.line())


class _PlainConsole(Console):
    """A rich console that prints every string without markup, and with control characters escaped.

    Strings in tables and titles are printed so, too.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


@cache
def stderr() -> Console:
    """Return the console of stderr. It is made at the first use, not at the import.

    rich then reads whether stderr is a terminal, and environment variables such as TERM. In a fork of the preloading
    server, these are set only after the imports.
    """
    return _PlainConsole(stderr=True)


def stdout_console(width: int) -> Console:
    """Return a console of stdout, as wide as the terminal; without a terminal, `width` columns wide."""
    return _PlainConsole(width=None if sys.stdout.isatty() else width)


def show(*things: RenderableType) -> None:
    """Print tables or lines to stdout, as wide as the terminal; without a terminal, 120 columns wide."""
    console = stdout_console(120)
    for thing in things:
        console.print(thing)


def say_wrapped(paragraphs: Iterable[str]) -> None:
    """Print paragraphs to stdout: on a terminal broken between words, elsewhere unchanged."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        paragraphs = [textwrap.fill(text, width, break_on_hyphens=False) for text in paragraphs]
    say("\n".join(paragraphs))


def say(text: str, *, end: str = "\n", to: TextIO | None = None) -> None:
    """Print a result to stdout. Control characters are escaped on a terminal, and unchanged elsewhere.

    Args:
        to: the original stdout, if `sys.stdout` is redirected.
    """
    stdout = to or sys.stdout
    stdout.write((printable(text) if stdout.isatty() else text) + end)
    stdout.flush()


def say_csv(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print CSV to stdout: a header, and a line for each row."""
    writer = csv.DictWriter(sys.stdout, names)
    writer.writeheader()
    clean = printable if sys.stdout.isatty() else str
    for row in rows:
        writer.writerow({name: clean(value) if isinstance(value, str) else value for name, value in row.items()})


def tell(thing: RenderableType, *, soft_wrap: bool = False) -> None:
    """Print a table or a line to stderr. An error while writing, such as a full disk, is ignored."""
    with suppress(OSError):
        stderr().print(thing, soft_wrap=soft_wrap)


def note(text: str, *, quiet: bool) -> None:
    """Print one line to stderr, unless --quiet was given."""
    if not quiet:
        tell(" ".join(printable(text).splitlines()), soft_wrap=True)


def shortened(text: str, width: int) -> str:
    """Return an untrusted text on one line of at most `width` columns of a terminal, with an ellipsis where it is cut.

    Control characters are escaped, and white space becomes single spaces.
    """
    line = Text(printable(" ".join(text.split())))
    line.truncate(width, overflow="ellipsis")
    return line.plain


def note_plain(document: str, plain: dict[str, int], *, quiet: bool) -> None:
    """Print a note with the special tokens of a text that were read as plain text; nothing if there are none.

    Args:
        document: name of the text, such as `the question`.
        plain: count of each special token that was read as plain text.
    """
    if plain:
        told = "; ".join(f"{token}, {'once' if times == 1 else f'{times:,} times'}" for token, times in plain.items())
        note(
            f"{document} contains special tokens of the model ({told}): read as plain text; --special-tokens gives "
            "them their meaning",
            quiet=quiet,
        )


@contextmanager
def waiting(what: str, *, quiet: bool) -> Iterator[None]:
    """Within the context, print from time to time how long a task without progress reports has been running.

    With `quiet`, print nothing.
    """
    if quiet:
        yield
        return
    outer = telling()
    with ProgressLines(partial(note, quiet=False), what) if outer is None else outer.instead(what):
        yield


class _TimeLeftColumn(ProgressColumn):
    """The estimated time that is left of a stage."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["remaining"].told())


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that draws a progress bar per stage on a terminal.

    The function is called with the name of a stage, the number of steps done, and the number of all its steps.
    If stderr is no terminal, progress lines are printed from time to time instead. With `quiet`, nothing is printed.
    """
    if not quiet and not stderr().is_terminal:
        with ProgressLines(partial(note, quiet=False)) as lines:
            yield lines.show
        return
    bars = Progress(
        TextColumn("{task.description:14}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _TimeLeftColumn(),
        console=stderr(),
        disable=quiet,
    )
    tasks, left = dict[str, TaskID](), dict[str, Remaining]()

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            left[stage] = Remaining()
            tasks[stage] = bars.add_task(printable(stage), total=total, remaining=left[stage])
        left[stage].show(done, total)
        bars.update(tasks[stage], completed=done, total=total)

    with bars:
        yield show
