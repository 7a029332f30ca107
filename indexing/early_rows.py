"""Writes a context's keys and values while the prefill runs: a disk may be slower than that."""

import torch

from sparsekv.formats.growing_file import Rows
from sparsekv.formats.int8_rows import KEY_BLOCK, quantise, quantised_shapes, row_of
from sparsekv.formats.schema import layer_file
from sparsekv.formats.writer import ArtifactWriter

LEAST_BYTES = 512 << 10  # of one head: a system call each, and from a GPU a copy


class EarlyRows:
    """Begins the missing files of a context with the rows that are there after each chunk.

    Args:
        missing: names of the files to write.
        in_8_bits: convert them; whole blocks of keys alone, as the scales of a block are those of all of its tokens.
    """

    def __init__(self, writer: ArtifactWriter, recipe: str, missing: set[str], *, in_8_bits: bool):
        self.writer, self.recipe, self.missing, self.in_8_bits = writer, recipe, missing, in_8_bits
        self._ends: dict[int, int] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """Write rows before `end` of a layer's keys and values [Hk, N, D], once there are enough of them or all."""
        name, start, (_, tokens, D) = layer_file("context", layer), self._ends.get(layer, 0), keys.shape
        if self.in_8_bits and end < tokens:
            end -= end % KEY_BLOCK
        enough = (end - start) * D * (1 if self.in_8_bits else keys.itemsize) >= LEAST_BYTES
        if name not in self.missing or end == start or not (enough or end == tokens):
            return
        self._ends[layer] = end
        part = keys[:, start:end], values[:, start:end]
        if self.in_8_bits:
            whole, rows = quantised_shapes(keys), quantise(*part)
        else:
            whole, rows = {"keys": keys, "values": values}, {"keys": part[0], "values": part[1]}
        placed = {key: Rows(row_of(key, start), some) for key, some in rows.items()}
        # What is converted is a copy, which takes memory of its own until it is written.
        self.writer.write_rows(name, whole, placed, self.recipe, wait=self.in_8_bits)
