"""The finished index in a build's folder: its rows and queries, which the build may reuse."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from sparsekv.formats.context_rows import Pair, context_rows
from sparsekv.formats.schema import Manifest, layer_file
from sparsekv.formats.writer import ArtifactWriter


class EarlierIndex:
    """Reads a finished index, onto the model's device, while its folder is locked for a build."""

    def __init__(self, writer: ArtifactWriter, model: PreTrainedModel):
        assert writer.base is not None
        self.manifest: Manifest = writer.base
        self._writer, self._device, self._dtype = writer, model.device, model.dtype

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of a file, by its name."""
        return self._writer.read_base(name, self._device)

    def are_whole(self, names: Iterable[str]) -> bool:
        """Whether files are there with their checksums. Their rows, copied, would get valid checksums of their own."""
        return all(self._writer.is_whole(self.manifest.files[name]) for name in names)

    def rows(self, layer: int, tokens: int) -> Pair:
        """Keys and values [Hk, tokens, D] of a layer's first tokens, in the model's dtype."""
        return context_rows(self.read(layer_file("context", layer)), self._dtype).part(slice(tokens))

    def query_positions(self) -> torch.Tensor:
        """Positions [P], rising, of stored queries: the sample's, in the middle, then the tail's.

        There are none where a file of queries is damaged.
        """
        split, layers = self.manifest.split, self.manifest.indexed_layers
        if not self.are_whole(layer_file(folder, layer) for folder in self._query_folders() for layer in layers):
            return torch.zeros(0, dtype=torch.int64)
        tail = torch.arange(split.sinks + split.middle, split.tokens)
        if not self._has_sample():
            return tail
        sampled = self._writer.read_base(layer_file("samples", layers[0]))["positions"]
        return torch.cat([sampled.long(), tail])

    def queries(self, layer: int) -> torch.Tensor:
        """The queries [Hq, P, D] of a layer at `query_positions`."""
        names = {"samples": "queries", "queries": "tail"}
        return torch.cat([self.read(layer_file(one, layer))[names[one]] for one in self._query_folders()], 1)

    def sample_size(self) -> int:
        """How many positions of the middle have stored queries."""
        stored = self.manifest.files.get(layer_file("samples", self.manifest.indexed_layers[0]))
        return 0 if stored is None else stored.tensors["positions"].shape[0]

    def is_finite(self, tokens: int) -> bool:
        """Whether the rows of the first tokens are finite, and the sampled queries."""
        for layer in range(len(self.manifest.layers)):
            tensors = list(self.rows(layer, tokens))
            if (name := layer_file("samples", layer)) in self.manifest.files:
                tensors.append(self.read(name)["queries"])
            if not all(bool(rows.isfinite().all()) for rows in tensors):
                return False
        return True

    def _has_sample(self) -> bool:
        return layer_file("samples", self.manifest.indexed_layers[0]) in self.manifest.files

    def _query_folders(self) -> list[str]:
        return ["samples", "queries"] if self._has_sample() else ["queries"]
