"""Tensors as the bytes of a safetensors file, in pieces: memory never holds a whole copy of them or of the file."""

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch

from sparsekv.formats.folder import Folder
from sparsekv.formats.schema import FileRecord, TensorRecord

# In the order in which the safetensors library writes them.
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
STAGING = 16 << 20  # bytes of page-locked memory through which tensors are copied from a GPU


def safetensors_header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a safetensors file, and where in it each tensor begins, in the order of the file."""
    header, starts, end = {}, {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (_ORDER.index(item[1].dtype), item[0])):
        starts[name], end = end, end + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [starts[name], end]}
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    first = len(encoded).to_bytes(8, "little") + encoded
    return first, {name: len(first) + start for name, start in starts.items()}


def safetensors_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Pieces of the bytes of a safetensors file, the same bytes as the safetensors library writes.

    A piece is valid until the next one is requested, as of `host_pieces`.
    """
    first, starts = safetensors_header(tensors)
    yield first
    for name in starts:
        yield from host_pieces(tensors[name].detach().contiguous().flatten().view(torch.uint8))


def host_pieces(flat: torch.Tensor, ready: torch.cuda.Event | None = None) -> Iterator[memoryview]:
    """Bytes [n] uint8 of a tensor on any device, in pieces.

    A piece is valid until the next one is requested: it may be the tensor's own memory, or staging memory that all
    pieces from a GPU share.

    Args:
        ready: the event on the tensor's GPU after which the bytes are there; by default all that it was given so far.
    """
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    staging = torch.empty(min(STAGING, len(flat)), dtype=torch.uint8, pin_memory=True)
    # On a stream of its own, which does not wait for what the device is given meanwhile.
    stream = torch.cuda.Stream(flat.device)
    stream.wait_event(ready or torch.cuda.current_stream(flat.device).record_event())
    for piece in flat.split(STAGING):
        with torch.cuda.stream(stream):
            staged = staging[: len(piece)].copy_(piece, non_blocking=True)
        stream.synchronize()
        yield staged.numpy().data


def write_tensors(folder: Folder, path: str, tensors: Mapping[str, torch.Tensor], recipe: str) -> FileRecord:
    """Write tensors as a safetensors file of a folder, atomically, and return its record. OSError if it fails."""
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
    """The record of a file that holds these tensors."""
    shapes = {
        key: TensorRecord(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for key, tensor in tensors.items()
    }
    return FileRecord(path=path, bytes=size, sha256=sha256, recipe=recipe, tensors=shapes)
