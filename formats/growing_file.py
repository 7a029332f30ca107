"""A file of rows that is written while these come to be, so that little is left to write when the last one is there.

Several processes that each have a part of the heads can write one file: each of them its own heads' rows.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.schema import FileRecord
from sparsekv.formats.tensor_bytes import file_record, host_pieces, safetensors_header
from sparsekv.formats.unfinished_file import OpenFile, UnfinishedFile

RemoteSum = Callable[[], str | None]
"""Waits for the sha256 that another process makes of a file, and returns it; None if this one has to make it."""
FLUSHED = 64 << 20  # bytes after which a file's are sent to the disk: else all of them would wait for its end


@dataclass(frozen=True)
class HeadPart:
    """Which of `parts` equal parts of a file's heads a process has; by default all of them."""

    number: int = 0
    parts: int = 1


ALL_HEADS = HeadPart()


class GrowingPart:
    """One process's heads of a safetensors file of tensors [H, N, D] that are filled from the front along N; that of
    the first process, which also begins, names and records the file, is a `GrowingFile`.

    Memory: 16 MiB of page-locked memory for each thread, where the tensors are on a GPU.

    Args:
        file: what they are written to.
        tensors: this part, [H / parts, N, D], allocated as a whole; bytes are read when `put` says that they are there.
    """

    def __init__(self, file: OpenFile, tensors: Mapping[str, torch.Tensor], part: HeadPart):
        self._file, self._tensors, self._part, self._end, self._unflushed = file, tensors, part, 0, 0
        self._whole = {
            name: torch.empty(len(own) * part.parts, *own.shape[1:], dtype=own.dtype, device="meta")
            for name, own in tensors.items()
        }
        self._header, self._starts = safetensors_header(self._whole)
        self._puts: list[Future[None]] = []

    def put(self, end: int, threads: ThreadPoolExecutor) -> None:
        """Have a thread write the rows before `end`. Raises OSError if an earlier one could not be written."""
        for put in self._puts:
            if put.done():
                put.result()
        device = next(iter(self._tensors.values())).device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._puts.append(threads.submit(self._write, self._end, end, ready))
        self._end = end

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all of them are written, or for so long, and let go of the tensors; returns whether they are.

        Raises:
            OSError: one could not be written.
        """
        # All of them first: whoever hears of a failure closes the file, whose descriptor the others would still use.
        if wait(self._puts, seconds).not_done:
            return False
        for put in self._puts:
            put.result()
        self._tensors = {}
        return True

    def _write(self, start: int, end: int, ready: torch.cuda.Event | None) -> None:
        for name, first in self._starts.items():
            tensor = self._tensors[name]
            # A thread begins on the first GPU, where a rank of another one would take half a gigabyte for its context.
            with torch.cuda.device_of(tensor):
                for head, rows in enumerate(tensor[:, start:end], self._part.number * len(tensor)):
                    place = first + (head * tensor.shape[1] + start) * tensor.shape[2] * tensor.itemsize
                    for piece in host_pieces(rows.flatten().view(torch.uint8), ready):
                        self._file.write(piece, place)
                        place += len(piece)
                    self._unflushed += rows.nbytes
        if self._unflushed >= FLUSHED:
            self._unflushed = 0
            os.fdatasync(self._file.descriptor)


class GrowingFile(GrowingPart):
    """The part of the process that begins the file, names it and records it.

    Args:
        file: an empty one.
        tensors: those heads that this process has.
    """

    def __init__(self, file: UnfinishedFile, tensors: Mapping[str, torch.Tensor], part: HeadPart = ALL_HEADS):
        super().__init__(file, tensors, part)
        self._unfinished = file
        file.write(self._header, 0)

    def finish(self, path: str, recipe: str, remote_sum: RemoteSum | None = None) -> FileRecord:
        """Wait until all rows are written, give the file its name, and return its record. Raises OSError if it fails.

        Its hash is of what is read back, which the page cache holds. Other processes must be done with it.

        Args:
            remote_sum: gives the hash, if another process makes it.
        """
        try:
            self.wait()
            sha256 = (remote_sum and remote_sum()) or hash_descriptor(self._unfinished.descriptor)
            self._unfinished.keep()
        except BaseException:
            self.discard()
            raise
        size = len(self._header) + sum(tensor.nbytes for tensor in self._whole.values())
        return file_record(path, size, sha256, recipe, self._whole)

    @property
    def descriptor(self) -> int:
        """Of the file, until it has its name or is removed."""
        return self._unfinished.descriptor

    def discard(self) -> None:
        """Remove it, once no thread writes to it."""
        self._unfinished.discard()
