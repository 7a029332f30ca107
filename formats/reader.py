"""Reads an artifact: mapped, so that only rows that are accessed are read from disk, or into a GPU's memory."""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.context_rows import ContextRows, Pair, context_rows
from sparsekv.formats.device_read import device_reader
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.int8_rows import bounds
from sparsekv.formats.layout import check_layout
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.schema import TOKENS, FileRecord, Manifest, layer_file
from sparsekv.formats.snapshot import Snapshot
from sparsekv.formats.values import not_finite

THREADS = min(16, os.cpu_count() or 1)
CPU = torch.device("cpu")


def map_tensors(descriptor: int, what: str) -> dict[str, torch.Tensor]:
    """All tensors of an open safetensors file, as views of its memory mapping, which outlives the descriptor.

    Args:
        what: the file's name in error messages.

    Raises:
        ArtifactError: it cannot be read as a safetensors file.
    """
    try:
        with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ArtifactError(f"cannot read {what}: {error}; {REBUILD}") from None


def on_device(
    mapped: dict[str, torch.Tensor],
    descriptor: int,
    what: str,
    device: torch.device,
    skipped: Mapping[str, int],
) -> dict[str, torch.Tensor]:
    """Tensors as they are mapped from an open safetensors file, or copies on a GPU, which reads the file itself.

    Args:
        what: the file's name in error messages.
        skipped: bytes that a tensor has in the file before what is mapped here, by name.

    Raises:
        ArtifactError: it ends early or cannot be read.
    """
    if device.type == "cpu":
        return mapped
    try:
        return device_reader(device).read(descriptor, mapped, skipped)
    except OSError as error:
        raise ArtifactError(f"cannot read {what}: {(error.strerror or str(error)).lower()}; {REBUILD}") from None


class Artifact:
    """A finished index on disk, as it was when opened, whatever a writer does later.

    Opening reads the manifest, opens every file, checks file sizes, and checks that the shapes in the manifest agree.
    The first read of a file checks the names, shapes and dtypes of its tensors against the manifest, its sha256 if it
    is smaller than a layer's keys and values, and that scales of keys and values are finite.

    Args:
        thorough: check the sha256 of every file on its first read, and that its numbers are finite; for callers that
            read all of it anyway, and measure.
        mending: files of methods may be missing, for a build that makes them anew and reads none.

    Raises:
        ArtifactError: no index there, unfinished, newer, damaged, not readable, or a file is missing or truncated.
    """

    def __init__(self, folder: Path, *, thorough: bool = False, mending: bool = False):
        self.folder, self.thorough = folder, thorough
        self._snapshot = Snapshot(folder, mending=mending)
        self.manifest: Manifest = self._snapshot.manifest
        check_layout(self.manifest, folder)
        self._checked, self._summed = set[str](), set[str]()

    @property
    def manifest_data(self) -> bytes:
        """The manifest's bytes as stored on disk."""
        return self._snapshot.data

    def descriptor(self, name: str) -> int:
        """Descriptor of a logical file; it stays open for as long as this index."""
        return self._snapshot.descriptors[name]

    def tensors(self, name: str, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """All tensors of one logical file; of each the rows that `_own_rows` tells.

        On a CPU they are views of its memory mapping, whose rows are read when accessed; on a GPU copies.

        Raises:
            ArtifactError: the file is not what the manifest says.
        """
        what, first = f"{name} of {self.folder}", name not in self._checked
        tensors = map_tensors(self.descriptor(name), what)
        if first:
            self._check(name, self.manifest.files[name], tensors)
        own = {key: rows for key, one in tensors.items() if (rows := self._own_rows(name, key, one)) is not None}
        skipped = {key: tensors[key][: rows.start].nbytes for key, rows in own.items()}
        tensors |= {key: tensors[key][rows] for key, rows in own.items()}
        tensors = on_device(tensors, self.descriptor(name), what, device, skipped)
        doubted = bounds(tensors) if first else {}
        if self.thorough:
            doubted = tensors | doubted
        if first and (wrong := not_finite(doubted)):
            raise ArtifactError(f"{wrong} in {what} holds numbers that are not finite; {REBUILD}")
        self._checked.add(name)
        return tensors

    def _own_rows(self, name: str, key: str, tensor: torch.Tensor) -> slice | None:
        """Which rows of a file's tensor are read, from a first one on; None: all of it."""
        return None

    def heads_and_channels(self, layer: int) -> tuple[int, int]:
        """Hk and D of a layer's keys and values."""
        heads, _, channels = self.manifest.files[layer_file("context", layer)].tensors["keys"].shape
        return heads, channels

    def input_ids(self) -> torch.Tensor:
        """Token ids of the fixed prompt, [N] int64."""
        return self.tensors(TOKENS)["input_ids"]

    def context_rows(self, layer: int, device: torch.device = CPU) -> ContextRows:
        """One layer's keys and values as they are stored: mapped on a CPU, copied to a GPU."""
        return context_rows(self.tensors(layer_file("context", layer), device), getattr(torch, self.manifest.dtype))

    def context(self, layer: int, device: torch.device = CPU) -> Pair:
        """Keys and values as attended, each [Hk, N, D], of one layer; copies where they are stored in 8 bits."""
        return self.context_rows(layer, device).part(slice(None))

    def queries(self, layer: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """`tail` [Hq, R, D]: the held-out queries; `sink_logits` [Hq] where the layer has attention sinks."""
        return self.tensors(layer_file("queries", layer), device)

    def method_tensors(self, method: str, layer: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Tensors that one method built for one layer; KeyError for a method that the index does not have."""
        return self.tensors(layer_file(method, layer), device)

    def check_sums(self, names: Iterable[str]) -> None:
        """Check the sha256 of several files in parallel threads, which reading them would check one by one.

        Raises:
            ArtifactError: a file whose content has changed.
        """
        wanted = [name for name in names if name not in self._summed and self._is_summed(self.manifest.files[name])]
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(self._check_sum, wanted))

    def verify(self) -> Iterator[str]:
        """Recheck every file's sha256, yielding each logical name after its check.

        Raises:
            ArtifactError: at the first file whose content has changed.
        """
        for name in self.manifest.files:
            self._check_sum(name)
            yield name

    def _check(self, name: str, record: FileRecord, tensors: dict[str, torch.Tensor]) -> None:
        found = {key: (list(tensor.shape), str(tensor.dtype)) for key, tensor in tensors.items()}
        if found != {key: (one.shape, f"torch.{one.dtype}") for key, one in record.tensors.items()}:
            raise ArtifactError(f"{name} of {self.folder} holds other tensors than its manifest says; {REBUILD}")
        if name not in self._summed and self._is_summed(record):
            self._check_sum(name)

    def _is_summed(self, record: FileRecord) -> bool:
        return self.thorough or record.bytes < self.manifest.files[layer_file("context", 0)].bytes

    def _check_sum(self, name: str) -> None:
        if hash_descriptor(self.descriptor(name)) != self.manifest.files[name].sha256:
            method = name.partition("/")[0]
            again = f"build it again with {add_methods_hint(self.folder, [method])}"
            remedy = again if method in self.manifest.methods else REBUILD
            raise ArtifactError(f"{name} of {self.folder} is damaged: its sha256 does not match; {remedy}")
        self._summed.add(name)
