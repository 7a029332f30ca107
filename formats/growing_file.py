"""A file of rows that is written while these come to be, so that little is left to write when the last one is there."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.folder import UnfinishedFile
from sparsekv.formats.schema import FileRecord
from sparsekv.formats.tensor_bytes import file_record, host_pieces, safetensors_header

FLUSHED = 64 << 20  # bytes after which a file's are sent to the disk: else all of them would wait for its end


@dataclass(frozen=True)
class Rows:
    """Rows [H, n, ...] of a tensor [H, N, ...], of which the first is number `first` of N."""

    first: int
    rows: torch.Tensor


class GrowingFile:
    """A safetensors file of tensors [H, N, ...] that come to be along N.

    Memory: 16 MiB of page-locked memory for each thread, where the rows are on a GPU.

    Args:
        file: what it is written to.
        tensors: with the shapes and dtypes of the whole ones; they may be on `meta`.
    """

    def __init__(self, file: UnfinishedFile, tensors: Mapping[str, torch.Tensor]):
        self._file, self._unflushed = file, 0
        self._tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        first, self._starts = safetensors_header(tensors)
        self._size = len(first) + sum(tensor.nbytes for tensor in tensors.values())
        self._puts: list[Future[None]] = []
        file.write(first, 0)

    def put(
        self, rows: Mapping[str, Rows], threads: ThreadPoolExecutor, done: Callable[[], None] = lambda: None
    ) -> None:
        """Have a thread write rows of each tensor, and then call `done`. Raises OSError if earlier ones could not be
        written."""
        for put in self._puts:
            if put.done():
                put.result()
        device = next(iter(rows.values())).rows.device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._puts.append(threads.submit(self._write, rows, ready, done))

    def finish(self, path: str, recipe: str) -> FileRecord:
        """Wait until all rows are written, give the file its name, and return its record. Raises OSError if it fails.

        Its hash is of what is read back, which the page cache holds.
        """
        try:
            for put in self._puts:
                put.result()
            sha256 = hash_descriptor(self._file.descriptor)
            self._file.keep()
        except BaseException:
            self.discard()
            raise
        return file_record(path, self._size, sha256, recipe, self._tensors)

    def discard(self) -> None:
        """Remove it, once no thread writes to it."""
        self._file.discard()

    def _write(self, rows: Mapping[str, Rows], ready: torch.cuda.Event | None, done: Callable[[], None]) -> None:
        try:
            for name, some in rows.items():
                whole, first = self._tensors[name], self._starts[name]
                row = whole[0, 0].nbytes
                for head, of_head in enumerate(some.rows):
                    place = first + (head * whole.shape[1] + some.first) * row
                    for piece in host_pieces(of_head.flatten().view(torch.uint8), ready):
                        self._file.write(piece, place)
                        place += len(piece)
                    self._unflushed += of_head.nbytes
            if self._unflushed >= FLUSHED:
                self._unflushed = 0
                os.fdatasync(self._file.descriptor)
        finally:
            done()
