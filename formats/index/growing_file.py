"""Write safetensors files at once or chunk by chunk during a prefill, and hold tensors that wait to be written."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.index.folder import Folder, OpenFile, UnfinishedFile
from sparsekv.formats.index.schema import FileRecord, TensorRecord

# Names of dtypes in a safetensors header, in the order in which the safetensors library writes tensors of these dtypes.
_CODES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = list(_CODES)
STORED_DTYPES = frozenset(_CODES)
STAGING = 16 << 20  # bytes of page-locked memory through which tensors are copied from a GPU


def safetensors_header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header bytes of a safetensors file, and the file offset of each tensor, in file order."""
    header, starts, end = {}, {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (_ORDER.index(item[1].dtype), item[0])):
        starts[name], end = end, end + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [starts[name], end]}
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    first = len(encoded).to_bytes(8, "little") + encoded
    return first, {name: len(first) + start for name, start in starts.items()}


def safetensors_bytes(
    tensors: Mapping[str, torch.Tensor], ready: torch.cuda.Event | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file in pieces; they are the bytes that the safetensors library would write.

    A piece is valid until the next piece is requested. `ready` is the event on the tensors' GPU after which their bytes
    are written; by default all work on the current stream so far.
    """
    first, starts = safetensors_header(tensors)
    yield first
    for name in starts:
        yield from host_pieces(tensors[name].detach().contiguous().flatten().view(torch.uint8), ready)


def host_pieces(flat: torch.Tensor, ready: torch.cuda.Event | None = None) -> Iterator[memoryview]:
    """Yield the bytes of a tensor [n] uint8 on any device as host memory, in pieces.

    A piece is valid until the next piece is requested. It is the tensor's own memory, or a staging buffer that all
    pieces from a GPU share.

    Args:
        ready: the event on the tensor's GPU after which its bytes are written; by default all work on the current
            stream so far.
    """
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    staging = torch.empty(min(STAGING, len(flat)), dtype=torch.uint8, pin_memory=True)
    # The copies run on their own stream, so they do not wait for work that is queued on other streams later.
    stream = torch.cuda.Stream(flat.device)
    stream.wait_event(ready or torch.cuda.current_stream(flat.device).record_event())
    for piece in flat.split(STAGING):
        with torch.cuda.stream(stream):
            staged = staging[: len(piece)].copy_(piece, non_blocking=True)
        stream.synchronize()
        yield staged.numpy().data


def write_tensors(folder: Folder, path: str, tensors: Mapping[str, torch.Tensor], recipe: str) -> FileRecord:
    """Write tensors atomically to a safetensors file in a folder, and return its record. Raises OSError."""
    sha256, size = hashlib.sha256(), 0

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in safetensors_bytes(tensors):
            sha256.update(piece)
            size += len(piece)
            yield piece

    folder.write(path, counted())
    return file_record(path, size, sha256.hexdigest(), recipe, tensors)


def file_record(path: str, size: int, sha256: str, recipe: str, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Make the manifest's record of a file that holds these tensors."""
    return FileRecord(path=path, bytes=size, sha256=sha256, recipe=recipe, tensors=tensor_records(tensors))


def tensor_records(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorRecord]:
    """Make the manifest's records of tensors, by name."""
    return {
        key: TensorRecord(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for key, tensor in tensors.items()
    }


class HeldTensors:
    """Holds the tensors of files by name until threads have written them.

    Args:
        most: the limit in bytes of all tensors added with `wait`. A single larger file is held alone. Tensors added
            without `wait` are not counted, because their memory is needed anyway.
    """

    def __init__(self, most: int):
        self._most = most
        self._held: dict[str, Mapping[str, torch.Tensor]] = {}
        self._counted: dict[str, int] = {}
        # Always enter this lock and never the condition. The condition's __enter__ is Python code, and Ctrl-C inside it
        # would leave the lock held forever.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)

    def add(self, name: str, tensors: Mapping[str, torch.Tensor], *, wait: bool) -> None:
        """Hold a file's tensors; with `wait`, first wait until the limit allows it."""
        with self._guard:
            if wait:
                size = sum(tensor.nbytes for tensor in tensors.values())
                self._changed.wait_for(lambda: not self._counted or sum(self._counted.values()) + size <= self._most)
                self._counted[name] = size
            self._held[name] = tensors

    def get(self, name: str) -> Mapping[str, torch.Tensor] | None:
        """Return a file's tensors; None if they are not held, such as after they were written."""
        with self._guard:
            return self._held.get(name)

    def drop(self, name: str) -> None:
        """Release a file's tensors, if they are held."""
        with self._guard:
            self._held.pop(name, None)
            self._counted.pop(name, None)
            self._changed.notify_all()


RemoteSum = Callable[[], str | None]
"""Function that waits for a file's sha256 from another process, and returns it.

If it returns None, this process must compute the sha256.
"""
FLUSHED = 64 << 20  # bytes after which a file is flushed to disk: else the final fsync would have to write all of them


@dataclass(frozen=True)
class HeadPart:
    """A process's share of a file's heads: part `number` of `parts` equal parts; by default all heads."""

    number: int = 0
    parts: int = 1


ALL_HEADS = HeadPart()


class GrowingPart:
    """Writes one process's heads to a safetensors file while a prefill fills the tensors token by token.

    The file's tensors are [H, N, D] (heads, tokens, channels). The first process, which also creates, names and records
    the file, uses a `GrowingFile`. For tensors on a GPU, each thread allocates 16 MiB of page-locked memory.

    Args:
        file: the file to write to.
        tensors: this process's heads, [H / parts, N, D], allocated for all N tokens. A token's rows are read after a
            `put` that includes the token.
        part: the share of the file's heads that this process writes.
        end: number of tokens whose rows the file has already.
        summed: compute a checksum of the rows of each `put`.
    """

    def __init__(
        self,
        file: OpenFile,
        tensors: Mapping[str, torch.Tensor],
        part: HeadPart,
        *,
        end: int = 0,
        summed: bool = False,
    ):
        self._file, self._tensors, self._part, self._end, self._unflushed = file, tensors, part, end, 0
        self._summed = summed
        self._whole = {
            name: torch.empty(len(own) * part.parts, *own.shape[1:], dtype=own.dtype, device="meta")
            for name, own in tensors.items()
        }
        self._header, self._starts = safetensors_header(self._whole)
        self._puts: list[Future[str]] = []

    def put(self, end: int, threads: ThreadPoolExecutor) -> None:
        """Let a thread write the rows from the last call's end to `end`.

        Raises:
            OSError: an earlier write is known to have failed.
        """
        for put in self._puts:
            if put.done():
                put.result()
        device = next(iter(self._tensors.values())).device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._puts.append(threads.submit(self._write, self._end, end, ready))
        self._end = end

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` until all rows are written; return whether they are, and if so release the tensors.

        Raises:
            OSError: rows could not be written.
        """
        # Wait for all threads before raising: the caller then closes the file, whose descriptor they would still use.
        if wait(self._puts, seconds).not_done:
            return False
        for put in self._puts:
            put.result()
        self._tensors = {}
        return True

    @property
    def last_put(self) -> Future[str]:
        """Future of the last `put`. Its result is the sha256 of the written rows; an empty string without `summed`."""
        return self._puts[-1]

    def _write(self, start: int, end: int, ready: torch.cuda.Event | None) -> str:
        digest = hashlib.sha256() if self._summed else None
        for name, first in self._starts.items():
            tensor = self._tensors[name]
            # A new thread uses GPU 0 by default. Without this, a rank of another GPU would create a CUDA context there,
            # which takes half a gigabyte.
            with torch.cuda.device_of(tensor):
                for head, rows in enumerate(tensor[:, start:end], self._part.number * len(tensor)):
                    place = first + (head * tensor.shape[1] + start) * tensor.shape[2] * tensor.itemsize
                    for piece in host_pieces(rows.flatten().view(torch.uint8), ready):
                        self._file.write(piece, place)
                        place += len(piece)
                        if digest:
                            digest.update(piece)
                    self._unflushed += rows.nbytes
        if self._unflushed >= FLUSHED:
            self._unflushed = 0
            os.fdatasync(self._file.descriptor)
        return digest.hexdigest() if digest else ""


class GrowingFile(GrowingPart):
    """Writes the first process's heads to a safetensors file, as `GrowingPart` does for the other processes.

    Also writes the file's header, gives the file its name, and returns its record.

    Args:
        file: an empty file, or one that already has the header and the first `end` rows.
        tensors: the heads of this process, [H / parts, N, D].
    """

    def __init__(
        self,
        file: UnfinishedFile,
        tensors: Mapping[str, torch.Tensor],
        part: HeadPart = ALL_HEADS,
        *,
        end: int = 0,
        summed: bool = False,
    ):
        super().__init__(file, tensors, part, end=end, summed=summed)
        self._unfinished = file
        if not end:
            file.write(self._header, 0)

    def finish(self, path: str, recipe: str, remote_sum: RemoteSum | None = None) -> FileRecord:
        """Wait until all rows are written, give the file its name, and return its record.

        Unless `remote_sum` returns the sha256, the file is read back to compute it, usually from the page cache. Other
        processes must have finished writing their heads. If anything fails, the file is removed and the error raised.
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
        """File descriptor, valid until the file gets its name or is removed."""
        return self._unfinished.descriptor

    def discard(self) -> None:
        """Remove the file. No thread may write to it any more."""
        self._unfinished.discard()

    def leave(self) -> None:
        """Close the file and leave it under its temporary name. No thread may write to it any more."""
        self._unfinished.leave()

    @property
    def header(self) -> bytes:
        """The bytes before the first tensor."""
        return self._header
