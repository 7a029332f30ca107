"""What opening an index reads before it is needed: while transformers is imported, or while the model is loaded."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Self

import torch

from sparsekv.formats.beside import run_beside
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.device import choose_device
from sparsekv.formats.pages import map_pages
from sparsekv.formats.reader import Artifact
from sparsekv.runtime.cache.layer_rows import LayerRows


class EarlyReading:
    """The sums of an index's files, its keys and values, and a method's tensors: a thread checks the sums, maps the
    rows' pages, and checks the tensors' values.

    What cannot be read is left for whoever needs it to read, and to tell why it cannot. For a GPU the thread only
    checks sums, and only from `begin_loading` on: threads that read and the one that imports would take turns, and the
    whole command would gain nothing.

    Args:
        device: as `choose_device` takes it.
        files: files of the index whose sums are checked.
        hold: map the rows of all layers but those with a window, and check the values of the method's tensors.
        method: what the index will be asked by; nothing is checked of one that has no tensors in it.
    """

    def __init__(
        self, artifact: Artifact, device: str, files: Sequence[str] = (), *, hold: bool = False, method: str = ""
    ):
        self.rows: dict[int, LayerRows] = {}
        """The layers' rows whose pages are being mapped, which hold the method's tensors once these are checked."""
        self._artifact, self._files, self._later = artifact, files, not _is_cpu(device)
        if self._later:
            return
        if hold:
            self.rows = {layer: LayerRows(artifact, layer) for layer in artifact.manifest.indexed_layers}
        rows, checked = list(self.rows.values()), method if method in artifact.manifest.methods else None
        # Asked here, so that this thread has its number before the other sets its own.
        self._begin(_read(artifact, files, rows, checked, torch.get_num_threads()))

    def begin_loading(self) -> Self:
        """To be called once all is imported, before the model is loaded."""
        if self._later:
            self._begin(_check_one_by_one(self._artifact, self._files))
        return self

    def _begin(self, steps: Iterator[None]) -> None:
        run_beside(_as_far_as_can_be(steps), "early-reading")


def _is_cpu(device: str) -> bool:
    # A device that there is not is told by whoever loads the model for it.
    with suppress(SparsekvError):
        return choose_device(device).type == "cpu"
    return False


def _as_far_as_can_be(steps: Iterator[None]) -> Iterator[None]:
    # Whatever cannot be read here, and why, is met again and told by whoever needs it.
    with suppress(Exception):
        yield from steps


def _check_one_by_one(artifact: Artifact, files: Sequence[str]) -> Iterator[None]:
    # By this thread alone: more would take the time of those that read the model's weights. What is left of them when
    # the sums are wanted is checked by all cores.
    for file in files:
        artifact.check_sums([file])
        yield


def _read(
    artifact: Artifact, files: Sequence[str], rows: list[LayerRows], method: str | None, threads: int
) -> Iterator[None]:
    yield from _check_one_by_one(artifact, files)
    for layer in rows:
        yield from map_pages(layer.stored.tensors.values())
    if rows and method is not None:
        yield from _check_method(rows, method, threads)


def _check_method(rows: list[LayerRows], method: str, threads: int) -> Iterator[None]:
    # By this thread alone: with another of torch's it would wait at each operation for a core, which the one that
    # imports has. The number is each thread's own once it was asked for it; others get what was set last.
    torch.set_num_threads(1)
    try:
        for layer in rows:
            layer.check_method(method)
            yield
    finally:
        torch.set_num_threads(threads)
