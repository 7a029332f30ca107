"""Load models for a command. Messages of transformers are hidden, and progress goes to stderr."""

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
from sparsekv.cli.common.stats import counted_dtype, windows_line
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import AUTO, Manifest, Weights
from sparsekv.formats.models.find import EMBEDDED, find_model, remember
from sparsekv.formats.models.load import LoadedModel, load_model
from sparsekv.kernels.common.first_calls import make_first_calls
from sparsekv.runtime.decoding.early import EarlyReading
from sparsekv.runtime.decoding.load import load_and_open, with_weights
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.selection.interface import methods

if TYPE_CHECKING:  # --help needs no torch, and only ranks need torch.distributed
    import torch

    from sparsekv.formats.distributed.group import Ranks


def load(
    name: str | None,
    device: str,
    dtype: str,
    rope_scaling: str | None,
    *,
    quiet: bool,
    weights: Weights | None = None,
    ranks: "Ranks | None" = None,
) -> LoadedModel:
    """Load a model and its tokenizer, or the embedded model if `name` is None.

    A model that the user names here is trusted later too, when only an index names it. Raises the errors of
    `load_model` and of `with_weights`, and UsageError for rounded weights on several ranks or for a method's name.

    Args:
        weights: the precision to which the weights of linear layers are rounded; None for the checkpoint's weights.
        ranks: the processes that each load a share of the model; all of them call this.
    """
    transformers.logging.set_verbosity_error()
    _refuse_method(name)
    progress, name_or_own = partial(note, quiet=quiet), EMBEDDED if name is None else name
    if ranks is not None:
        if weights is not None and ranks.size > 1:
            raise UsageError(f"--weights {weights} cannot be combined with --gpus; leave one of them out")
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
        loaded = with_weights(loaded, weights, progress)
    if name is not None and (ranks is None or ranks.first):
        remember(loaded.name)
    resume_collector()
    return loaded


def _fetch_once(name: str, progress: Callable[[str], None], ranks: "Ranks") -> None:
    """Let the first rank download missing files of a model before the other ranks look for them. This may take
    hours."""
    fetched = Future[None]()

    def fetch_it() -> None:
        try:
            find_model(name, progress)
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
    weights: str = AUTO,
    hold: bool = False,
    loaded_in: Callable[[float], None] = lambda seconds: None,
    ranks: "Ranks | None" = None,
    early: EarlyReading | None = None,
) -> OpenIndex:
    """Load a model and open an index with it. Messages of transformers are hidden, and progress goes to stderr.

    Raises the errors of `load_and_open`, and UsageError if `name` is that of a method.

    Args:
        name: the model; None: the model that built the index.
        weights, hold, loaded_in, ranks, early: passed to `load_and_open`.
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
            artifact,
            name,
            device,
            dtype,
            progress,
            weights=weights,
            hold=hold,
            loaded_in=loaded_in,
            ranks=ranks,
            early=early,
        )
    resume_collector()
    return opened


class OpeningTimes:
    """Measures the seconds to load a model and to open an index with it. Pass the method `loaded` to `load_for`."""

    def __init__(self) -> None:
        self._began, self._loading = time.perf_counter(), 0.0

    def loaded(self, seconds: float) -> None:
        """Record the seconds that loading the model took."""
        self._loading = seconds

    def show(self, by: str, manifest: Manifest, computed_in: "torch.dtype") -> None:
        """Print notes with the method, the dtype of keys and values, and both times. Call this once the index is open.

        Args:
            by: describes the method that answers questions; empty: the method is shown elsewhere.
            manifest: manifest of the index.
            computed_in: dtype of the model, which may differ from that of the index.
        """
        opening = time.perf_counter() - self._began - self._loading
        model = str(computed_in).removeprefix("torch.")
        other = "" if model == manifest.dtype else f"; the model computes in {model}"
        note(f"{by}{', ' * bool(by)}keys and values in {counted_dtype(manifest)}{other}", quiet=False)
        if windows := windows_line(manifest):
            note(windows, quiet=False)
        note(f"model loaded in {self._loading:.2f} s, index opened in {opening:.2f} s", quiet=False)


def _refuse_method(model: str | None) -> None:
    """Raise UsageError if the name of a method is given as a model, because -m stands for --model.

    A local folder of this name is accepted as a model.
    """
    if model in methods() and not os.path.isdir(model):
        raise UsageError(f"--model {model}: {model} is a method, not a model; give it as --method {model}")
