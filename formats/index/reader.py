"""Reading an index: a snapshot of its files, tensors mapped or read into a GPU's memory, and the heads of one rank."""

import os
import resource
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.device import device_reader
from sparsekv.formats.errors import ArtifactError, UsageError, reason_of
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.index.context_rows import ContextRows, Pair, bounds, context_rows
from sparsekv.formats.index.folder import Folder, SharedFile
from sparsekv.formats.index.layout import check_layout, first_axis, not_finite
from sparsekv.formats.index.manifest import REBUILD, REPAIR, REPAIR_APPENDED, manifest_data, open_folder, parse_manifest
from sparsekv.formats.index.schema import TOKENS, FileRecord, Manifest, layer_file

ATTEMPTS = 100
"""Enough unless a writer finishes about once a millisecond."""
_OTHER_DESCRIPTORS = 256  # spare ones, for what else a process with a model and a GPU opens


class Snapshot:
    """A manifest and its open files.

    Args:
        mending: files of methods may be missing or of another length, and are not open then.

    Raises:
        ArtifactError: no index there, unfinished, newer or damaged, or a file is missing, of another length, no plain
            file, or cannot be read.
    """

    def __init__(self, path: Path, *, mending: bool = False):
        self.folder = open_folder(path)
        self.data = b""
        for _ in range(ATTEMPTS):
            self.data = manifest_data(self.folder)
            self.manifest = parse_manifest(self.data, self.folder)
            _allow_descriptors(len(self.manifest.files))
            try:
                self.descriptors = _open_all(self.folder, self.manifest, mending)
            except ArtifactError:
                if manifest_data(self.folder) == self.data:
                    raise
                continue
            weakref.finalize(self, _close_all, list(self.descriptors.values()))
            if manifest_data(self.folder) == self.data:
                return
        raise ArtifactError(f"{path} is being changed without an end by another process; wait for it, and try again")


def _open_all(folder: Folder, manifest: Manifest, mending: bool) -> dict[str, int]:
    descriptors: dict[str, int] = {}
    try:
        for name, record in manifest.files.items():
            method = next((one for one in manifest.methods if name.startswith(f"{one}/")), None)
            with suppress(ArtifactError) if mending and method else nullcontext():
                descriptors[name] = _open(folder, name, record, _remedy(folder, manifest, method))
    except BaseException:
        _close_all(list(descriptors.values()))
        raise
    return descriptors


def _remedy(folder: Folder, manifest: Manifest, method: str | None) -> str:
    """A remedy for a missing file: a method's file is built from the others."""
    if method is not None:
        return f"build it again with {add_methods_hint(folder.path, [method])}"
    return REPAIR_APPENDED if manifest.additions else REPAIR


def _open(folder: Folder, name: str, record: FileRecord, remedy: str) -> int:
    try:
        descriptor = folder.open(record.path)
    except FileNotFoundError:
        raise ArtifactError(f"{name} of {folder.path} is missing; {remedy}") from None
    except OSError as error:
        raise ArtifactError(
            f"cannot read {name} of {folder.path}: {reason_of(error)}; mend that, or {REBUILD}"
        ) from None
    size = os.fstat(descriptor).st_size
    if size != record.bytes:
        os.close(descriptor)
        change = "truncated" if size < record.bytes else "longer than it was written"
        raise ArtifactError(f"{name} of {folder.path} is {change}: {size} bytes, not {record.bytes}; {remedy}")
    return descriptor


def _allow_descriptors(files: int) -> None:
    """Raise the limit on open files if needed: an index has a file for each layer and method."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    wanted = used + files + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most < used + files:
            raise ArtifactError(
                f"an index of {files} files cannot be opened by a process that may open {hard}; raise `ulimit -n`"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


THREADS = min(16, os.cpu_count() or 1)
CPU = torch.device("cpu")


def map_tensors(descriptor: int, what: str) -> dict[str, torch.Tensor]:
    """All tensors of an open safetensors file, as views of its memory mapping, which outlives the descriptor.

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
        skipped: bytes that a tensor has in the file before what is mapped here, by name.

    Raises:
        ArtifactError: it ends early or cannot be read.
    """
    if device.type == "cpu":
        return mapped
    try:
        return device_reader(device).read(descriptor, mapped, skipped)
    except OSError as error:
        raise ArtifactError(f"cannot read {what}: {reason_of(error)}; {REBUILD}") from None


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


class ArtifactShare(Artifact):
    """An open index of which every tensor with a head axis, Hk or Hq, has only one rank's heads.

    Whoever reads it sees an index of fewer heads, and needs to know nothing of the others. Its manifest stays that of
    the whole index. On a CPU tensors are views of the mapped files, as those of the whole index are.

    Args:
        whole: the index; both read its open files.
        number: the rank's, of `size`.
        heads: KV heads of a rank in each layer; a rank that has all of a layer's keeps them all.

    Raises:
        ArtifactError: the index has another number of heads than all ranks together.
    """

    def __init__(self, whole: Artifact, number: int, size: int, heads: Sequence[int]):
        self.folder, self.thorough, self.manifest = whole.folder, whole.thorough, whole.manifest
        self._snapshot, self._summed = whole._snapshot, whole._summed
        self._checked = set[str]()  # its own: it checks the numbers of this rank's heads alone
        self._parts = [
            _part(whole, layer, number, size, own) for layer, own in enumerate(heads[: len(whole.manifest.layers)])
        ]

    def heads_and_channels(self, layer: int) -> tuple[int, int]:
        heads, channels = super().heads_and_channels(layer)
        return heads // self._parts[layer][1], channels

    def _own_rows(self, name: str, key: str, tensor: torch.Tensor) -> slice | None:
        """This rank's heads.

        Raises:
            UsageError: a method that this version does not know stored tensors whose axes are not known.
        """
        if name == TOKENS:
            return None
        folder, layer = name.split("/")
        place, parts = self._parts[_number(layer)]
        axis = first_axis(folder, key)
        if axis is None and parts > 1:
            raise UsageError(
                f"{key} of {folder} in {self.folder} cannot be shared out over ranks: its axes are not known; use one "
                "process"
            )
        if axis not in ("Hk", "Hq"):
            return None
        heads = len(tensor) // parts
        return slice(place * heads, (place + 1) * heads)


def _part(whole: Artifact, layer: int, number: int, size: int, own: int) -> tuple[int, int]:
    """Which of how many parts of a layer's heads are a rank's own."""
    heads, _ = whole.heads_and_channels(layer)
    if own == heads:
        return 0, 1
    if own * size != heads:
        raise ArtifactError(
            f"{layer_file('context', layer)} of {whole.folder} has {heads} KV heads, and {size} ranks have {own} each: "
            "it was built with another model"
        )
    return number, size


def _number(file: str) -> int:
    return int(file.removeprefix("layer_").partition(".")[0])


class WholeFile:
    """Such a file, open for as long as someone has this, whoever names or removes it meanwhile.

    Args:
        descriptor: of the file; this opens it again, for reading alone.

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
