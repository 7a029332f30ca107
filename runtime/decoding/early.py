"""Read an index early: a thread reads the index's files and prepares the method while libraries and the model load."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Self

import torch

from sparsekv.formats.device import choose_device, map_pages, run_beside
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.kept import kept_index
from sparsekv.runtime.decoding.prepare import PreparedMethod, files_read
from sparsekv.runtime.selection.interface import MethodSpec

BESIDE_LOADING = 4
"""Number of checksums computed concurrently while the model's weights are loaded to a GPU.

With sixteen the threads that read the weights would wait.
"""


class EarlyReading:
    """Reads an index early: a thread checks checksums, maps the pages of keys and values, and prepares a method.

    Errors in the thread are ignored, because the code that needs the data reads the data again and raises. For a GPU
    the thread only checks checksums, and only after `begin_loading`. If it began earlier, this thread and the thread
    that imports libraries would take turns, so the command would not become faster. For a CPU there is no thread if the
    server that forked this process has already prepared the index.

    Args:
        device: a device name, as `choose_device` takes it.
        files: files of the index whose checksums are checked.
        hold: map the rows of all layers without a sliding window, and prepare the method.
        form: the variant of the method that will answer; None: no method is prepared. The variant is only prepared with
            `hold`, and if the index has the method's tensors.
    """

    def __init__(
        self,
        artifact: Artifact,
        device: str,
        files: Sequence[str] = (),
        *,
        hold: bool = False,
        form: MethodSpec | None = None,
    ):
        self.rows: dict[int, LayerRows] = {}
        """Keys and values of each layer whose pages the thread maps."""
        self.prepared: PreparedMethod | None = None
        """The method, if all of its layers are prepared."""
        self._artifact, self._files, self._later = artifact, files, not _is_cpu(device)
        self._loading = False
        if self._later or _is_prepared(artifact, form):
            return
        if hold:
            self.rows = {layer: LayerRows(artifact, layer) for layer in artifact.manifest.indexed_layers}
        # get_num_threads fixes this thread's number of torch threads, before the new thread sets a number for itself.
        self._begin(
            self._read(form if form and form.name in artifact.manifest.methods else None, torch.get_num_threads())
        )

    @classmethod
    def of(cls, artifact: Artifact, device: str, config: DecodeConfig) -> Self:
        """Return an `EarlyReading` of the files that decoding with a config needs.

        Call this method before transformers is imported.
        """
        form = config.attention if isinstance(config.attention, MethodSpec) else None
        files, hold = files_read(artifact, config.attention), config.placement == "device"
        return cls(artifact, device, files, hold=hold, form=form)

    def begin_loading(self) -> Self:
        """Announce that all modules are imported and that the model is loaded next; for a GPU, start the thread.

        A method that is not prepared by then is prepared when the index is opened. While the model loads, torch's
        default dtype is the model's dtype, which would affect the preparation.
        """
        self._loading = True
        if self._later:
            self._begin(_check(self._artifact, self._files, BESIDE_LOADING))
        return self

    def _begin(self, steps: Iterator[None]) -> None:
        run_beside(_as_far_as_can_be(steps), "early-reading")

    def _read(self, form: MethodSpec | None, threads: int) -> Iterator[None]:
        yield from _check(self._artifact, self._files, 1)  # one file at a time, because another core is importing
        rows = list(self.rows.values())  # copied, because opening the index removes them one by one
        for layer in rows:
            yield from map_pages(layer.stored.tensors.values())
        if rows and form is not None:
            yield from self._prepare(form, rows, threads)

    def _prepare(self, form: MethodSpec, rows: list[LayerRows], threads: int) -> Iterator[None]:
        # One torch thread, because a second torch thread would wait in each operation for the core that the importing
        # thread uses. A thread that has called get_num_threads keeps its number of torch threads; all other threads get
        # the number that was set last, and so the number is set back at the end.
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


def _is_prepared(artifact: Artifact, form: MethodSpec | None) -> bool:
    """Whether the server that forked this process has already checked the index's files and prepared the method `form`.

    Without a method, the checked files are enough.
    """
    kept = kept_index(artifact)
    if kept is None or form is None or kept.prepared is None:
        return kept is not None and form is None
    return kept.prepared.is_like(PreparedMethod(form))


def _is_cpu(device: str) -> bool:
    # If the device does not exist, loading the model raises the error.
    with suppress(SparsekvError):
        return choose_device(device).type == "cpu"
    return False


def _as_far_as_can_be(steps: Iterator[None]) -> Iterator[None]:
    # Errors are suppressed, because the code that needs the data raises the same error.
    with suppress(Exception):
        yield from steps


def _check(artifact: Artifact, files: Sequence[str], together: int) -> Iterator[None]:
    """Check the checksums of files, `together` files at a time, yielding after each group.

    Files that are not yet checked when the index is used are checked then, by all cores.
    """
    for first in range(0, len(files), together):
        artifact.check_sums(files[first : first + together])
        yield
