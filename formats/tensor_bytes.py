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


def safetensors_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Pieces of the bytes of a safetensors file, the same bytes as the safetensors library writes.

    A piece is valid until the next one is requested: it may be the tensor's own memory, or staging memory that all
    pieces from a GPU share.
    """
    tensors = dict(sorted(tensors.items(), key=lambda item: (_ORDER.index(item[1].dtype), item[0])))
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for tensor in tensors.values():
        yield from _pieces(tensor.detach().contiguous().flatten().view(torch.uint8))


def _pieces(flat: torch.Tensor) -> Iterator[memoryview]:
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    staging = torch.empty(min(STAGING, len(flat)), dtype=torch.uint8, pin_memory=True)
    # On a stream of its own, which does not wait for what the device is given meanwhile.
    stream = torch.cuda.Stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
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
    shapes = {
        key: TensorRecord(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for key, tensor in tensors.items()
    }
    return FileRecord(path=path, bytes=size, sha256=sha256.hexdigest(), recipe=recipe, tensors=shapes)
