"""What opening an index on a CPU reads while the program still imports transformers, which takes longer."""

from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.device import choose_device
from sparsekv.formats.pages import map_pages
from sparsekv.formats.reader import Artifact
from sparsekv.runtime.cache.layer_rows import LayerRows


class EarlyReading:
    """The sums of an index's files, and its keys and values: a thread checks the ones and maps the others' pages.

    What cannot be read is left for whoever needs it to read, and to tell why it cannot. Nothing is read for a GPU: the
    threads that would do it and the one that imports take turns, and the whole command gains nothing.

    Args:
        device: as `choose_device` takes it.
        files: files of the index whose sums are checked.
        hold: map the rows of all layers but those with a window.
    """

    def __init__(self, artifact: Artifact, device: str, files: Sequence[str] = (), *, hold: bool = False):
        self.rows: dict[int, LayerRows] = {}
        """The layers' rows whose pages are being mapped."""
        if not _is_cpu(device):
            return
        if hold:
            self.rows = {layer: LayerRows(artifact, layer) for layer in artifact.manifest.indexed_layers}
        reading = [artifact, files, list(self.rows.values())]
        Thread(target=_read, args=reading, name="early-reading", daemon=True).start()


def _is_cpu(device: str) -> bool:
    # A device that there is not is told by whoever loads the model for it.
    with suppress(SparsekvError):
        return choose_device(device).type == "cpu"
    return False


def _read(artifact: Artifact, files: Sequence[str], rows: list[LayerRows]) -> None:
    # RuntimeError: a program that ends meanwhile starts no more threads.
    with suppress(SparsekvError, OSError, RuntimeError):
        artifact.check_sums(files)
        for layer in rows:
            map_pages(layer.stored.tensors.values())
