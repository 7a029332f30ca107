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
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.decoding.prepare import PreparedMethod, files_read
from sparsekv.runtime.selection.form import Form

BESIDE_LOADING = 4
"""Sums that are made at a time while a GPU gets the model's weights; with sixteen, those that read these would wait."""


class EarlyReading:
    """The sums of an index's files, its keys and values, and a method's tensors: a thread checks the sums, maps the
    rows' pages, and prepares the method.

    What cannot be read is left for whoever needs it to read, and to tell why it cannot. For a GPU the thread only
    checks sums, and only from `begin_loading` on: threads that read and the one that imports would take turns, and the
    whole command would gain nothing.

    Args:
        device: as `choose_device` takes it.
        files: files of the index whose sums are checked.
        hold: map the rows of all layers but those with a window, and prepare the method.
        form: what the index will be asked by; one that has no tensors in it is not prepared.
    """

    def __init__(
        self,
        artifact: Artifact,
        device: str,
        files: Sequence[str] = (),
        *,
        hold: bool = False,
        form: Form | None = None,
    ):
        self.rows: dict[int, LayerRows] = {}
        """The layers' rows whose pages are being mapped."""
        self.prepared: PreparedMethod | None = None
        """The method, once all of its layers are prepared."""
        self._artifact, self._files, self._later = artifact, files, not _is_cpu(device)
        self._loading = False
        if self._later:
            return
        if hold:
            self.rows = {layer: LayerRows(artifact, layer) for layer in artifact.manifest.indexed_layers}
        # Asked here, so that this thread has its number before the other sets its own.
        self._begin(
            self._read(form if form and form.name in artifact.manifest.methods else None, torch.get_num_threads())
        )

    @classmethod
    def of(cls, artifact: Artifact, device: str, config: DecodeConfig) -> Self:
        """Begin to read what answers by a config need, before transformers is imported."""
        form = config.attention if isinstance(config.attention, Form) else None
        files, hold = files_read(artifact, config.attention), config.placement == "device"
        return cls(artifact, device, files, hold=hold, form=form)

    def begin_loading(self) -> Self:
        """To be called once all is imported, before the model is loaded.

        A method that is not prepared by then is left to opening: torch's default dtype is the model's meanwhile.
        """
        self._loading = True
        if self._later:
            self._begin(_check(self._artifact, self._files, BESIDE_LOADING))
        return self

    def _begin(self, steps: Iterator[None]) -> None:
        run_beside(_as_far_as_can_be(steps), "early-reading")

    def _read(self, form: Form | None, threads: int) -> Iterator[None]:
        yield from _check(self._artifact, self._files, 1)  # by this thread alone: another core imports
        rows = list(self.rows.values())  # opening takes them out one by one
        for layer in rows:
            yield from map_pages(layer.stored.tensors.values())
        if rows and form is not None:
            yield from self._prepare(form, rows, threads)

    def _prepare(self, form: Form, rows: list[LayerRows], threads: int) -> Iterator[None]:
        # By this thread alone: with another of torch's it would wait at each operation for a core, which the one that
        # imports has. The number is each thread's own once it was asked for it; others get what was set last.
        torch.set_num_threads(1)
        try:
            prepared = PreparedMethod(form)
            for layer in rows:
                prepared.prepare(layer)
                if self._loading:
                    return
                yield
            self.prepared = prepared
        finally:
            torch.set_num_threads(threads)


def _is_cpu(device: str) -> bool:
    # A device that there is not is told by whoever loads the model for it.
    with suppress(SparsekvError):
        return choose_device(device).type == "cpu"
    return False


def _as_far_as_can_be(steps: Iterator[None]) -> Iterator[None]:
    # Whatever cannot be read here, and why, is met again and told by whoever needs it.
    with suppress(Exception):
        yield from steps


def _check(artifact: Artifact, files: Sequence[str], together: int) -> Iterator[None]:
    """The sums of files, so many at a time; what is left of them when they are wanted is checked by all cores."""
    for first in range(0, len(files), together):
        artifact.check_sums(files[first : first + together])
        yield
