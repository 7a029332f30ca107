"""What is stored of one layer, read once for all that need it while an index is opened."""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.context_rows import NAMES, ContextRows, Int8Rows, Name, Pair
from sparsekv.formats.reader import CPU, Artifact
from sparsekv.formats.values import check_values


@dataclass
class LayerRows:
    """Keys and values [Hk, N, D] of one layer, held for each device from first use to `release`.

    On a CPU they are views of one mapping of the index's file, so that whoever releases the pages of one view releases
    those of all. On a GPU they are a copy of what is stored: 0.5 GB for a layer of an 8B at 131,072 tokens in bfloat16,
    half of that in 8 bits; or, once `on` has restored these, of what they mean in the index's dtype.
    """

    artifact: Artifact
    layer: int
    _stored: dict[torch.device, ContextRows] = field(default_factory=dict)
    _restored: dict[torch.device, Pair] = field(default_factory=dict)

    @property
    def stored(self) -> ContextRows:
        """The rows as they are stored, mapped."""
        return self.stored_on(CPU)

    def stored_on(self, device: torch.device) -> ContextRows:
        """The rows as they are stored: mapped on a CPU, copied to a GPU."""
        if device not in self._stored:
            self._stored[device] = self.artifact.context_rows(self.layer, device)
        return self._stored[device]

    @property
    def mapped_keys(self) -> tuple[torch.Tensor, ...]:
        """The views of the index's file that keys are read from on a CPU."""
        return tuple(rows for name, rows in self.stored.tensors.items() if name.startswith("key"))

    def on(self, device: torch.device) -> Pair:
        """Keys and values on a device, in the index's dtype."""
        if device not in self._restored:
            stored = self.stored_on(device)
            self._restored[device] = stored.part(slice(None))
            if device.type != "cpu" and isinstance(stored, Int8Rows):
                del self._stored[device]
        return self._restored[device]

    def part(self, tokens: slice, device: torch.device) -> Pair:
        """Keys and values [Hk, T, D] of consecutive tokens on a device, in the index's dtype; only theirs are
        restored, and not held."""
        if device not in self._restored:
            return self.stored_on(device).part(tokens)
        keys, values = self._restored[device]
        return keys[:, tokens], values[:, tokens]

    def middle_keys(self, device: torch.device) -> torch.Tensor:
        """[Hk, M, D]; on a GPU a copy, so that `release` frees all other rows."""
        return self._middle("keys", device)

    def middle_values(self, device: torch.device) -> torch.Tensor:
        """[Hk, M, D]; on a GPU a copy, so that `release` frees all other rows."""
        return self._middle("values", device)

    def _middle(self, name: Name, device: torch.device) -> torch.Tensor:
        split = self.artifact.manifest.split
        tokens = slice(split.sinks, split.sinks + split.middle)
        if device in self._restored:
            rows = self._restored[device][NAMES.index(name)][:, tokens]
        else:
            rows = self.stored_on(device).some(name, tokens)
        return rows if device.type == "cpu" else rows.contiguous()

    def observed_queries(self, device: torch.device) -> torch.Tensor:
        """[Hk, G, W, D]: the queries of the tail's first half."""
        heads, _ = self.artifact.heads_and_channels(self.layer)
        first_half = self.artifact.queries(self.layer, device)["tail"][:, : self.artifact.manifest.split.tail // 2]
        return first_half.reshape(heads, -1, *first_half.shape[1:])

    def method_tensors(self, name: str, device: torch.device) -> dict[str, torch.Tensor]:
        """Tensors that a method of the index built for this layer, whose values are checked.

        Raises:
            ArtifactError: they hold what no build of ours writes.
        """
        tensors = self.artifact.method_tensors(name, self.layer, device)
        what = f"layer {self.layer} of {name} of {self.artifact.folder}"
        check_values(tensors, self.artifact.manifest.split, what)
        return tensors

    def release(self) -> None:
        """Let go of the rows."""
        self._restored.clear()
        self._stored.clear()
