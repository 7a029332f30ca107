"""A file of rows that is written while these come to be, so that little is left to write when the last one is there."""

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.folder import UnfinishedFile
from sparsekv.formats.schema import FileRecord
from sparsekv.formats.tensor_bytes import file_record, host_pieces, safetensors_header

FLUSHED = 64 << 20  # bytes after which a file's are sent to the disk: else all of them would wait for its end


class GrowingFile:
    """A safetensors file of tensors [H, N, D] that are filled from the front along N.

    Memory: 16 MiB of page-locked memory for each thread, where the tensors are on a GPU.

    Args:
        file: what it is written to.
        tensors: allocated as a whole; their bytes are read when `put` says that they are there.
    """

    def __init__(self, file: UnfinishedFile, tensors: Mapping[str, torch.Tensor]):
        self._file, self._tensors, self._end, self._unflushed = file, tensors, 0, 0
        first, self._starts = safetensors_header(tensors)
        self._size = len(first) + sum(tensor.nbytes for tensor in tensors.values())
        self._puts: list[Future[None]] = []
        file.write(first, 0)

    def put(self, end: int, threads: ThreadPoolExecutor) -> None:
        """Have a thread write the rows before `end`. Raises OSError if an earlier one could not be written."""
        for put in self._puts:
            if put.done():
                put.result()
        device = next(iter(self._tensors.values())).device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._puts.append(threads.submit(self._write, self._end, end, ready))
        self._end = end

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

    def _write(self, start: int, end: int, ready: torch.cuda.Event | None) -> None:
        for name, first in self._starts.items():
            tensor = self._tensors[name]
            for head, rows in enumerate(tensor[:, start:end]):
                place = first + (head * tensor.shape[1] + start) * tensor.shape[2] * tensor.itemsize
                for piece in host_pieces(rows.flatten().view(torch.uint8), ready):
                    self._file.write(piece, place)
                    place += len(piece)
                self._unflushed += rows.nbytes
        if self._unflushed >= FLUSHED:
            self._unflushed = 0
            os.fdatasync(self._file.descriptor)
