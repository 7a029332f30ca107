"""A model's weights, which a thread reads to a GPU while the program still imports transformers."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import torch

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.device import choose_device
from sparsekv.formats.models.find import local_folder
from sparsekv.formats.models.weights import Weights, weights_on


@dataclass(frozen=True)
class _Read:
    """The weights of the checkpoint in a folder."""

    folder: Path
    weights: Weights


class EarlyWeights:
    """The weights of a model that is on this machine, and other work of the same thread.

    For a CPU nothing is read, as transformers maps the weights. What cannot be read is left for `load_model` to read,
    and to tell why it cannot.

    Args:
        name: an embedded model, a local folder or a hub id.
        device: as `choose_device` takes it.
        then: called with the device once the weights are read; a SparsekvError, OSError or RuntimeError ends it.
    """

    def __init__(self, name: str, device: str, then: Callable[[torch.device], None]):
        self._name, self._then = name, then
        self._read: _Read | None = None
        self._has_read = Event()
        self._thread = Thread(target=self._work, args=[device], daemon=True)
        self._thread.start()

    def of(self, folder: Path) -> Weights | None:
        """The weights, once they are read; None if they were not, or are those of another folder."""
        self._has_read.wait()
        read, self._read = self._read, None
        return read.weights if read is not None and read.folder == folder else None

    def finish(self) -> None:
        """Wait until all work is done."""
        self._thread.join()

    def _work(self, text: str) -> None:
        try:
            with suppress(Exception):  # `load_model` meets it again
                device = choose_device(text)
                self._read = self._weights(device)
        finally:
            self._has_read.set()
        # RuntimeError: a GPU without enough memory, or another error of CUDA.
        with suppress(SparsekvError, OSError, RuntimeError):
            self._then(choose_device(text))

    def _weights(self, device: torch.device) -> _Read | None:
        if device.type == "cpu":
            return None
        folder = local_folder(self._name)
        weights = weights_on(folder, device)
        return None if weights is None else _Read(folder, weights)
