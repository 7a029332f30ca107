"""Settings of a command's process: warnings of libraries, Python's garbage collector, memory limits, and Ctrl-C."""

import gc
import importlib
import logging
import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer, main_thread
from types import FrameType
from typing import Any

from sparsekv.formats.errors import SparsekvError, UsageError

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment variables that hide warnings of libraries, unless the user sets them or asks for --debug."""

_RESTING = 1_000_000  # new objects until the next collection, between `rest_collector` and `resume_collector`
_USUAL = gc.get_threshold()


def rest_collector() -> None:
    """Let Python's garbage collector run rarely until `resume_collector`.

    The many new objects of imports and of a model would start it again and again, and few of them are garbage.
    """
    gc.set_threshold(_RESTING, *_USUAL[1:])


def resume_collector() -> None:
    """End `rest_collector`, if it was called: let Python's garbage collector run as usual.

    The collector then ignores all objects that exist now, which makes later collections faster.
    """
    if gc.get_threshold()[0] == _RESTING:
        gc.freeze()
        gc.set_threshold(*_USUAL)


LEAST = 768 * 2**20
"""Bytes of address space that torch and transformers need to load."""
LEAST_LEFT = (560 + 72 * (os.cpu_count() or 1)) * 2**20
"""Bytes of address space that must be left after all libraries are loaded, for a small model and for one thread of
about 70 MiB per core. Libraries may abort when a thread cannot start. Measured on 2 cores: an append
aborted at 650 MiB, never at 660."""


def refuse_lost_folder() -> None:
    """Raise UsageError if the current folder has been deleted, because torch's libraries would end the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder no longer exists; change to another folder") from None


def refuse_small_limit() -> None:
    """Raise SparsekvError if a memory limit (`ulimit -v`) is too small to load the libraries."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST:
        _refuse(limit, LEAST)


def refuse_little_room() -> None:
    """Raise SparsekvError if a memory limit leaves less than LEAST_LEFT bytes after the libraries are loaded.

    Under a memory limit faiss is loaded here too. Otherwise the first k-means would load faiss, which crashes if memory
    is missing.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not pages.exists():
        return
    for library in (None, "faiss"):
        if library is not None:
            importlib.import_module(library)
        needed = int(pages.read_text().split()[0]) * resource.getpagesize() + LEAST_LEFT
        if limit < needed:
            _refuse(limit, needed)


def _refuse(limit: int, needed: int) -> None:
    raise SparsekvError(
        f"there is not enough memory to start: a limit (ulimit -v) allows {limit >> 20} MiB; raise it to "
        f"{needed >> 20} MiB at least, plus the memory that the model needs"
    )


INTERRUPTED = 130
KEPT = {
    "build-index": "complete parts are kept, and the same command goes on from there",
    "append": "the index is as it was; complete parts are kept, and the same command goes on from there",
    "eval": "complete answers are kept, and the same command goes on from there",
    "generate": "the index is as it was",
    "chat": "the index is as it was",
    "tune": "the index is as it was",
    "serve": "answers that were not complete ended with an error",
}
"""Ends of the message after Ctrl-C, by command: what the interrupted command keeps. Other commands keep nothing."""


class Interruption:
    """Remembers whether Ctrl-C was pressed, because libraries turn KeyboardInterrupt into other errors, or lose it.

    Attributes:
        until_then: text for the message after Ctrl-C: the state until the same command runs again. It may be empty.
    """

    def __init__(self) -> None:
        self.came = False
        self.until_then = ""

    def told(self, command: str) -> str:
        """Return the line to print after Ctrl-C: what the interrupted command keeps."""
        resumes = any(one == "--resume" or one.startswith("--resume=") for one in sys.argv)
        kept = KEPT.get("eval" if resumes else command, "nothing was changed")
        return f"interrupted; {kept}{'; until then, ' * bool(self.until_then)}{self.until_then}"

    def take(self, number: int, frame: FrameType | None) -> None:
        if self.came:  # a second Ctrl-C does not wait for the cleanup
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        self.came = True
        raise KeyboardInterrupt


_active: list[Interruption] = []


def raise_lost_interrupt() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed and a library lost it, as torch does while it loads numpy."""
    if _active and _active[-1].came:
        raise KeyboardInterrupt


def pressed() -> Interruption | None:
    """Return the active `Interruption` if Ctrl-C was pressed; None otherwise."""
    return _active[-1] if _active and _active[-1].came else None


@contextmanager
def interruptions() -> Iterator[Interruption]:
    """Within the context, Ctrl-C is recorded and raises KeyboardInterrupt. Afterwards Ctrl-C kills the process.

    If SIGINT was ignored before, as in a background job of a shell script, it stays ignored.
    """
    interruption = Interruption()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield interruption
        return
    hook = sys.unraisablehook

    def again(unraisable: Any) -> None:
        """Send again an interrupt that came during a finaliser, because Python would only print it.

        An interrupt that is raised in this hook is only printed, too. So another thread sends it a moment later.
        """
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            interruption.came = False
            Timer(0.01, send).start()
        else:
            hook(unraisable)

    def send() -> None:
        if interruption in _active:
            signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)

    sys.unraisablehook = again
    signal.signal(signal.SIGINT, interruption.take)
    _active.append(interruption)
    try:
        yield interruption
    finally:
        _active.pop()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.unraisablehook = hook


@contextmanager
def quiet_libraries(*, debug: bool) -> Iterator[None]:
    """Within the context, hide warnings of libraries and log records up to WARNING. With `debug`, hide nothing."""
    if debug:
        yield
        return
    os.environ.update(QUIET | os.environ)
    shown, level = warnings.showwarning, logging.root.manager.disable
    warnings.showwarning = lambda *told, **more: None
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        warnings.showwarning = shown
        logging.disable(level)
