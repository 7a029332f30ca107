"""A file of an index by its record: whether it is whole, and its tensors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.folder import Folder
from sparsekv.formats.reader import map_tensors, on_device
from sparsekv.formats.schema import FileRecord


def is_there(folder: Folder, record: FileRecord) -> bool:
    """Whether the file of a record exists with its size; its content is not read."""
    with suppress(OSError), _opened(folder, record) as descriptor:
        return os.fstat(descriptor).st_size == record.bytes
    return False


def is_whole(folder: Folder, record: FileRecord) -> bool:
    """Whether the file of a record exists with the content that was written."""
    # The hash, not only the size: a kill between rename and journal leaves another recipe's file at the path.
    with suppress(OSError), _opened(folder, record) as descriptor:
        return os.fstat(descriptor).st_size == record.bytes and hash_descriptor(descriptor) == record.sha256
    return False


@contextmanager
def _opened(folder: Folder, record: FileRecord) -> Iterator[int]:
    descriptor = folder.open(record.path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_recorded(folder: Folder, record: FileRecord, what: str, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a record's file on a device; `what` is what messages call it. OSError if it cannot be read."""
    with _opened(folder, record) as descriptor:
        return on_device(map_tensors(descriptor, what), descriptor, what, device, {})
