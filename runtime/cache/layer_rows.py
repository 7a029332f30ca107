"""One layer's stored keys and values, read once for all that need them while an index is opened."""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.context_rows import ContextRows, Pair
from sparsekv.formats.reader import Artifact


@dataclass
class LayerRows:
    """Keys and values [Hk, N, D] of one layer, in the index's dtype, held for each device from first use to `release`.

    On a CPU they are views of one mapping of the index's file, so that whoever releases the pages of one view releases
    those of all. On a GPU, and on a CPU where they are stored in 8 bits, they are a copy: 0.5 GB for a layer of an 8B
    at 131,072 tokens.
    """

    artifact: Artifact
    layer: int
    _rows: dict[torch.device, Pair] = field(default_factory=dict)
    _stored: ContextRows | None = None

    @property
    def stored(self) -> ContextRows:
        """The rows as they are stored, mapped."""
        if self._stored is None:
            self._stored = self.artifact.context_rows(self.layer)
        return self._stored

    @property
    def mapped_keys(self) -> tuple[torch.Tensor, ...]:
        """The views of the index's file that keys are read from on a CPU."""
        return tuple(rows for name, rows in self.stored.tensors.items() if name.startswith("key"))

    def on(self, device: torch.device) -> Pair:
        """Keys and values on a device."""
        if device not in self._rows:
            stored = self.stored if device.type == "cpu" else self.artifact.context_rows(self.layer, device)
            self._rows[device] = stored.part(slice(None))
        return self._rows[device]

    def part(self, tokens: slice, device: torch.device) -> Pair:
        """Keys and values [Hk, T, D] of consecutive tokens on a device; on a CPU only theirs are restored."""
        if device.type == "cpu" and device not in self._rows:
            return self.stored.part(tokens)
        keys, values = self.on(device)
        return keys[:, tokens], values[:, tokens]

    def middle_keys(self, device: torch.device) -> torch.Tensor:
        """[Hk, M, D]; on a GPU a copy, so that `release` frees all other rows."""
        return _own(self._middle(device)[0])

    def middle_values(self, device: torch.device) -> torch.Tensor:
        """[Hk, M, D]; on a GPU a copy, so that `release` frees all other rows."""
        return _own(self._middle(device)[1])

    def _middle(self, device: torch.device) -> Pair:
        split = self.artifact.manifest.split
        return self.part(slice(split.sinks, split.sinks + split.middle), device)

    def observed_queries(self, device: torch.device) -> torch.Tensor:
        """[Hk, G, W, D]: the queries of the tail's first half."""
        heads, _ = self.artifact.heads_and_channels(self.layer)
        first_half = self.artifact.queries(self.layer, device)["tail"][:, : self.artifact.manifest.split.tail // 2]
        return first_half.reshape(heads, -1, *first_half.shape[1:])

    def release(self) -> None:
        """Let go of the rows."""
        self._rows.clear()
        self._stored = None


def _own(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.device.type == "cpu" else rows.contiguous()
