"""A share of an index: the KV heads that one of several ranks attends with, read as if it were the whole index."""

from collections.abc import Sequence

import torch

from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.layout import first_axis
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import TOKENS, layer_file


class ArtifactShare(Artifact):
    """An open index of which every tensor with a head axis, Hk or Hq, has only one rank's heads.

    Whoever reads it sees an index of fewer heads, and needs to know nothing of the others. Its manifest stays that of
    the whole index. On a CPU tensors are views of the mapped files, as those of the whole index are.

    Args:
        whole: the index; both read its open files.
        number: the rank's, of `size`.
        heads: KV heads of a rank in each layer; a rank that has all of a layer's keeps them all.

    Raises:
        ArtifactError: the index has another number of heads than all ranks together.
    """

    def __init__(self, whole: Artifact, number: int, size: int, heads: Sequence[int]):
        self.folder, self.thorough, self.manifest = whole.folder, whole.thorough, whole.manifest
        self._snapshot, self._summed = whole._snapshot, whole._summed
        self._checked = set[str]()  # its own: it checks the numbers of this rank's heads alone
        self._parts = [
            _part(whole, layer, number, size, own) for layer, own in enumerate(heads[: len(whole.manifest.layers)])
        ]

    def heads_and_channels(self, layer: int) -> tuple[int, int]:
        heads, channels = super().heads_and_channels(layer)
        return heads // self._parts[layer][1], channels

    def _own_rows(self, name: str, key: str, tensor: torch.Tensor) -> slice | None:
        """This rank's heads.

        Raises:
            UsageError: a method that this version does not know stored tensors whose axes are not known.
        """
        if name == TOKENS:
            return None
        folder, layer = name.split("/")
        place, parts = self._parts[_number(layer)]
        axis = first_axis(folder, key)
        if axis is None and parts > 1:
            raise UsageError(
                f"{key} of {folder} in {self.folder} cannot be shared out over ranks: its axes are not known; use one "
                "process"
            )
        if axis not in ("Hk", "Hq"):
            return None
        heads = len(tensor) // parts
        return slice(place * heads, (place + 1) * heads)


def _part(whole: Artifact, layer: int, number: int, size: int, own: int) -> tuple[int, int]:
    """Which of how many parts of a layer's heads are a rank's own."""
    heads, _ = whole.heads_and_channels(layer)
    if own == heads:
        return 0, 1
    if own * size != heads:
        raise ArtifactError(
            f"{layer_file('context', layer)} of {whole.folder} has {heads} KV heads, and {size} ranks have {own} each: "
            "it was built with another model"
        )
    return number, size


def _number(file: str) -> int:
    """A layer's number, of its file's name."""
    return int(file.removeprefix("layer_").partition(".")[0])
