"""A file of tensors that is whole, though it may have no name yet; it is read, and it is not written."""

import os
import weakref

import torch

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.folder import Folder
from sparsekv.formats.reader import map_tensors, on_device
from sparsekv.formats.unfinished_file import SharedFile


class WholeFile:
    """Such a file, open for as long as someone has this, whoever names or removes it meanwhile.

    Args:
        descriptor: of the file; this opens it again, for reading alone.
        what: what messages call it.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, descriptor: int, what: str):
        self._descriptor, self._what = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC), what
        weakref.finalize(self, os.close, self._descriptor)

    def sha256(self) -> str:
        """Its sha256, in hex; OSError if it cannot be read."""
        return hash_descriptor(self._descriptor)

    def read(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Its tensors: mapped on a CPU, copied to a GPU. Raises ArtifactError where it is no file of tensors."""
        return on_device(map_tensors(self._descriptor, self._what), self._descriptor, self._what, device, {})


def find_whole(folder: Folder, shared: SharedFile) -> WholeFile:
    """Open a whole file of an index as another process found it. Raises OSError where it is not that one."""
    descriptor = folder.open(shared.path)
    try:
        shared.check(descriptor)
        return WholeFile(descriptor, f"{shared.path} of {folder.path}")
    finally:
        os.close(descriptor)
