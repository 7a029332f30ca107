"""Reading an artifact: mapped into memory, so that only the rows that are touched are read."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sparsekv.formats.checksums import hash_file
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.manifest import read_manifest
from sparsekv.formats.schema import TOKENS, FileRecord, Manifest, layer_file

_REMEDY = "build the index again with `sparsekv build-index --force`"


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of one safetensors file, as views of its mapping.

    Raises:
        ArtifactError: the file is missing or is not one.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"cannot read {path}: {error}; {_REMEDY}") from None


class Artifact:
    """A finished index on disk.

    Opening reads the manifest and compares every file's presence and size; `verify` rechecks every sum.

    Raises:
        ArtifactError: no index there, unfinished, newer, damaged, or a file is missing or truncated.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        for name, record in self.manifest.files.items():
            self._check_size(name, record)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """All tensors of one logical file, as views of its mapping: rows are read when they are touched."""
        return map_tensors(self._path(name))

    def input_ids(self) -> torch.Tensor:
        """Token ids of the fixed prompt, [N] int64."""
        return self.tensors(TOKENS)["input_ids"]

    def context(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as attended, each [Hk, N, D], of one layer."""
        tensors = self.tensors(layer_file("context", layer))
        return tensors["keys"], tensors["values"]

    def queries(self, layer: int) -> dict[str, torch.Tensor]:
        """`tail` [Hq, R, D]: the held-out queries; `sink_logits` [Hq] where the layer has attention sinks."""
        return self.tensors(layer_file("queries", layer))

    def method_tensors(self, method: str, layer: int) -> dict[str, torch.Tensor]:
        """What one method built for one layer; an unknown method is a KeyError of the caller's."""
        return self.tensors(layer_file(method, layer))

    def verify(self) -> Iterator[str]:
        """Recheck every file's sha256, yielding each logical name once it is right.

        Raises:
            ArtifactError: at the first file whose content has changed.
        """
        for name, record in self.manifest.files.items():
            if hash_file(self._path(name)) != record.sha256:
                raise ArtifactError(f"{name} of {self.folder} is damaged: its sha256 does not match; {_REMEDY}")
            yield name

    def _path(self, name: str) -> Path:
        return self.folder / self.manifest.files[name].path

    def _check_size(self, name: str, record: FileRecord) -> None:
        path = self.folder / record.path
        if not path.is_file():
            raise ArtifactError(f"{name} of {self.folder} is missing; {_REMEDY}")
        if path.stat().st_size != record.bytes:
            raise ArtifactError(
                f"{name} of {self.folder} is truncated: {path.stat().st_size} bytes, not {record.bytes}; {_REMEDY}"
            )
