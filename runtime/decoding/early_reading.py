"""What opening an index reads while the program still imports transformers, which takes longer than all reading."""

from collections.abc import Sequence

import torch

from sparsekv.formats.models.early_weights import EarlyWeights
from sparsekv.formats.models.named import may_be_loaded
from sparsekv.formats.pages import map_pages
from sparsekv.formats.reader import Artifact
from sparsekv.kernels.attention.first_kernel import launch_first_kernel
from sparsekv.runtime.cache.layer_rows import LayerRows


class EarlyReading:
    """A model's weights, the sums of an index's files, and its keys and values, that a thread of its own reads.

    On a GPU weights and rows are read into its memory; on a CPU the rows' pages are mapped, and transformers maps the
    weights. Whatever cannot be read is left for whoever needs it to read, and to tell why it cannot.

    Args:
        model: a local folder or a hub id; None: the one that the index names, if it may be loaded.
        device: as `choose_device` takes it.
        files: files of the index whose sums are checked.
        hold: read all rows of all layers but those with a window.
    """

    def __init__(
        self, artifact: Artifact, model: str | None, device: str, files: Sequence[str] = (), *, hold: bool = False
    ):
        layers = artifact.manifest.indexed_layers if hold else []
        self._artifact, self._files = artifact, files
        self._rows = {layer: LayerRows(artifact, layer) for layer in layers}
        named = artifact.manifest.model.id
        if model is None and may_be_loaded(named):
            model = named
        self.weights = EarlyWeights(model or "", device, self._read)

    def rows(self, device: torch.device) -> dict[int, LayerRows]:
        """The layers' rows: on a GPU once all are read, on a CPU while their pages are being mapped."""
        if device.type != "cpu":
            self.weights.finish()
        return self._rows

    def _read(self, device: torch.device) -> None:
        launch_first_kernel(device)
        self._artifact.check_sums(self._files)
        for rows in self._rows.values():
            if device.type == "cpu":
                map_pages(rows.stored.tensors.values())
            else:
                rows.on(device)
