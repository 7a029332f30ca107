"""One layer's stored keys and values, read once for all that need them while an index is opened."""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.cache.kv_store import Pair


@dataclass
class LayerRows:
    """Keys and values [Hk, N, D] of one layer, in the index's dtype, held for each device from first use to `release`.

    On a CPU they are views of one mapping of the index's file, so that whoever releases the pages of one view releases
    those of all. On a GPU they are a copy: 0.5 GB for a layer of an 8B at 131,072 tokens.
    """

    artifact: Artifact
    layer: int
    _rows: dict[torch.device, Pair] = field(default_factory=dict)

    def on(self, device: torch.device) -> Pair:
        """Keys and values on a device."""
        if device not in self._rows:
            self._rows[device] = self.artifact.context(self.layer, device)
        return self._rows[device]

    def middle_keys(self, device: torch.device) -> torch.Tensor:
        """[Hk, M, D]; on a GPU a copy, so that `release` frees all other rows."""
        return self._middle(self.on(device)[0])

    def middle_values(self, device: torch.device) -> torch.Tensor:
        """[Hk, M, D]; on a GPU a copy, so that `release` frees all other rows."""
        return self._middle(self.on(device)[1])

    def _middle(self, rows: torch.Tensor) -> torch.Tensor:
        split = self.artifact.manifest.split
        middle = rows[:, split.sinks : split.sinks + split.middle]
        return middle if rows.device.type == "cpu" else middle.contiguous()

    def observed_queries(self, device: torch.device) -> torch.Tensor:
        """[Hk, G, W, D]: the queries of the tail's first half."""
        heads, _ = self.artifact.heads_and_channels(self.layer)
        first_half = self.artifact.queries(self.layer, device)["tail"][:, : self.artifact.manifest.split.tail // 2]
        return first_half.reshape(heads, -1, *first_half.shape[1:])

    def release(self) -> None:
        """Let go of the rows."""
        self._rows.clear()
