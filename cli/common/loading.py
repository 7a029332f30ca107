"""Loading models for a command: transformers' own advice stays off the user's screen, progress goes to stderr."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

import transformers

from sparsekv.cli.common.console import note, waiting
from sparsekv.cli.common.process import resume_collector
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.embedded import EMBEDDED, remember
from sparsekv.formats.models.find import fetch
from sparsekv.formats.models.load import LoadedModel, load_model
from sparsekv.kernels.common.first_calls import make_first_calls
from sparsekv.runtime.decoding.load import load_and_open
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import EarlyReading
from sparsekv.runtime.selection.registry import methods

if TYPE_CHECKING:  # only ranks need torch.distributed
    from sparsekv.formats.distributed.group import Ranks


def load(
    name: str | None, device: str, dtype: str, rope_scaling: str | None, *, quiet: bool, ranks: "Ranks | None" = None
) -> LoadedModel:
    """A model and its tokenizer, the embedded one where none is named; raises what `load_model` raises.

    A model that is named here may be loaded again later because an index names it.

    Args:
        ranks: the processes that load a share of it each; all of them call this.
    """
    transformers.logging.set_verbosity_error()
    _refuse_method(name)
    progress, name_or_own = partial(note, quiet=quiet), EMBEDDED if name is None else name
    if ranks is not None:
        _fetch_once(name_or_own, progress, ranks)
    with waiting(f"loading {name_or_own}", quiet=quiet):
        loaded = load_model(
            name_or_own,
            device=device,
            dtype=dtype,
            rope_scaling=rope_scaling,
            progress=progress,
            meanwhile=make_first_calls,
            ranks=1 if ranks is None else ranks.size,
        )
    if name is not None and (ranks is None or ranks.first):
        remember(loaded.name)
    resume_collector()
    return loaded


def _fetch_once(name: str, progress: Callable[[str], None], ranks: "Ranks") -> None:
    """Have the first rank download what is missing of a model before the others look for it; it may take hours."""
    fetched = Future[None]()

    def fetch_it() -> None:
        try:
            fetch(name, progress)
            fetched.set_result(None)
        except BaseException as error:
            fetched.set_exception(error)

    if ranks.first:
        Thread(target=fetch_it, daemon=True).start()  # a daemon: Ctrl-C does not wait for it
    else:
        fetched.set_result(None)
    ranks.wait_for_all(lambda seconds: bool(wait([fetched], seconds).done))
    fetched.result()
    ranks.share("there")


def load_for(
    artifact: Artifact,
    name: str | None,
    device: str,
    dtype: str,
    *,
    quiet: bool,
    hold: bool = False,
    loaded_in: Callable[[float], None] = lambda seconds: None,
    ranks: "Ranks | None" = None,
    early: EarlyReading | None = None,
) -> OpenIndex:
    """An index, opened with a model; raises what `load_and_open` raises.

    Args:
        hold, loaded_in, ranks, early: as `load_and_open` takes them.
    """
    transformers.logging.set_verbosity_error()
    _refuse_method(name)
    progress = partial(note, quiet=quiet)
    if ranks is not None:
        device = str(ranks.device)
        if name is not None:
            _fetch_once(name, progress, ranks)
    with waiting(f"loading {name or artifact.manifest.model.id} and opening {artifact.folder}", quiet=quiet):
        opened = load_and_open(
            artifact, name, device, dtype, progress, hold=hold, loaded_in=loaded_in, ranks=ranks, early=early
        )
    resume_collector()
    return opened


class OpeningTimes:
    """Seconds that loading a model and opening an index with it take; pass `loaded` to `load_for`."""

    def __init__(self) -> None:
        self._began, self._loading = time.perf_counter(), 0.0

    def loaded(self, seconds: float) -> None:
        """Record the seconds of the model."""
        self._loading = seconds

    def show(self, by: str) -> None:
        """Note by what questions are answered, unless it is empty, and both times; call it once the index is open."""
        opening = time.perf_counter() - self._began - self._loading
        note(by, quiet=not by)
        note(f"model loaded in {self._loading:.2f} s, index opened in {opening:.2f} s", quiet=False)


def _refuse_method(model: str | None) -> None:
    """Raise UsageError where a method is named as a model: -m is --model."""
    if model in methods() and not os.path.isdir(model):
        raise UsageError(f"--model {model}: {model} is a method, not a model; give it as --method {model}")
