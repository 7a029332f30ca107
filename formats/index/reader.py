"""Read an index: open a snapshot of its files, map or copy their tensors, and select the heads of a rank."""

import os
import resource
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.device import device_reader
from sparsekv.formats.errors import REBUILD, ArtifactError, UsageError, add_methods_hint, reason_of
from sparsekv.formats.index.context_rows import ContextRows, Pair, bounds, context_rows
from sparsekv.formats.index.folder import Folder, SharedFile
from sparsekv.formats.index.layout import check_layout, first_axis, not_finite
from sparsekv.formats.index.manifest import REPAIR, REPAIR_APPENDED, manifest_data, open_folder, parse_manifest
from sparsekv.formats.index.schema import STATES, TOKENS, FileRecord, Manifest, layer_file, state_file, state_tokens

ATTEMPTS = 100
"""Maximum number of attempts to open a manifest and its files while another process replaces the manifest."""
_OTHER_DESCRIPTORS = 256  # file descriptors that a process with a model and a GPU opens for other purposes


class Snapshot:
    """A manifest and its open files.

    Args:
        mending: leave out a method's file that is missing, has a wrong size or cannot be read, instead of raising.

    Raises:
        ArtifactError: there is no index, or it is unfinished, damaged or from a newer version. Or a file is missing,
            has a wrong size, is no regular file, or cannot be read. Or the process may not open so many files, or
            other processes keep replacing the index.
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
        raise ArtifactError(
            f"{path} keeps being changed by another process; wait until that process ends, and try again"
        )


def _open_all(folder: Folder, manifest: Manifest, mending: bool) -> dict[str, int]:
    descriptors: dict[str, int] = {}
    try:
        for name, record in manifest.files.items():
            mends = mending and _method_of(name, manifest) is not None
            with suppress(ArtifactError) if mends else nullcontext():
                descriptors[name] = _open(folder, record, _remedy(folder.path, manifest, name))
    except BaseException:
        _close_all(list(descriptors.values()))
        raise
    return descriptors


def _method_of(name: str, manifest: Manifest) -> str | None:
    """Return the method that built a logical file; None for a file that no method of the index built."""
    method = name.partition("/")[0]
    return method if method in manifest.methods else None


def _remedy(folder: Path, manifest: Manifest, name: str) -> str:
    """Return a remedy for a missing or damaged file. Only a method's file can be built again from the other files."""
    if (method := _method_of(name, manifest)) is not None:
        return f"build it again with {add_methods_hint(folder, [method])}"
    return REPAIR_APPENDED if manifest.additions else REPAIR


def _open(folder: Folder, record: FileRecord, remedy: str) -> int:
    try:
        descriptor = folder.open(record.path)
    except FileNotFoundError:
        raise ArtifactError(f"{record.path} of {folder.path} is missing; {remedy}") from None
    except OSError as error:
        raise ArtifactError(
            f"cannot read {record.path} of {folder.path}: {reason_of(error)}; correct that, or {REBUILD}"
        ) from None
    size = os.fstat(descriptor).st_size
    if size != record.bytes:
        os.close(descriptor)
        change = "truncated" if size < record.bytes else "longer than it was written"
        raise ArtifactError(f"{record.path} of {folder.path} is {change}: {size} bytes, not {record.bytes}; {remedy}")
    return descriptor


def _allow_descriptors(files: int) -> None:
    """Raise the process's limit on open files if needed, because an index has a file for each layer and method.

    Raises:
        ArtifactError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    wanted = used + files + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most < used + files:
            raise ArtifactError(
                f"the index has {files} files, and this process may open only {hard}; raise `ulimit -n`"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


THREADS = min(16, os.cpu_count() or 1)
CPU = torch.device("cpu")


def map_tensors(descriptor: int, what: str) -> dict[str, torch.Tensor]:
    """Map an open safetensors file, and return its tensors, which are views of the mapping.

    The mapping stays valid after the descriptor is closed.

    Args:
        what: the file's name in messages.

    Raises:
        ArtifactError: the file cannot be read as a safetensors file.
    """
    try:
        with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ArtifactError(f"cannot read {what}: {error}; {REBUILD}") from None


def on_device(
    mapped: dict[str, torch.Tensor], descriptor: int, what: str, device: torch.device, skipped: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return tensors of a mapped safetensors file: unchanged for a CPU, as copies in a GPU's memory for a GPU.

    The copies are read from the file, not through the mapping.

    Args:
        mapped: tensors of the file, or some consecutive rows of each.
        skipped: bytes of a tensor in the file before these rows, by name.

    Raises:
        ArtifactError: the file ends early or cannot be read.
    """
    if device.type == "cpu":
        return mapped
    try:
        return device_reader(device).read(descriptor, mapped, skipped)
    except OSError as error:
        raise ArtifactError(f"cannot read {what}: {reason_of(error)}; {REBUILD}") from None


class Artifact:
    """A finished index on disk, as it was when it was opened. Later writes by other processes do not change it.

    Opening reads the manifest, opens every file, checks file sizes, and checks that the shapes in the manifest agree
    with each other. The first read of a file checks the names, shapes and dtypes of its tensors against the manifest.
    It checks that recurrent and convolution states, and the scales of int8 keys and values, are finite. It also checks
    the sha256 of a file of states, and of any file that is smaller than a layer's keys and values.

    Args:
        thorough: check the sha256 of every file on its first read, and that its numbers are finite. This is for
            measurements, which read whole files anyway.
        mending: files of methods may be missing, for a build that makes them again and does not read them.

    Raises:
        ArtifactError: as `Snapshot`; or the manifest contradicts itself.
    """

    def __init__(self, folder: Path, *, thorough: bool = False, mending: bool = False):
        self.folder, self.thorough = folder, thorough
        self._snapshot = Snapshot(folder, mending=mending)
        self.manifest: Manifest = self._snapshot.manifest
        check_layout(self.manifest, folder)
        self._checked, self._summed = set[str](), set[str]()

    @property
    def _layer_bytes(self) -> int:
        """Size of the first layer's keys and values, in bytes."""
        return self.manifest.files[layer_file("context", min(self.manifest.attending))].bytes

    @property
    def manifest_data(self) -> bytes:
        return self._snapshot.data

    def descriptor(self, name: str) -> int:
        """Return the descriptor of a logical file, which stays open as long as this object exists."""
        return self._snapshot.descriptors[name]

    def _named(self, name: str) -> str:
        """Return the path on disk of a logical file, for messages.

        A file that was built again may have a part of its recipe's hash in its path.
        """
        return f"{self.manifest.files[name].path} of {self.folder}"

    def tensors(self, name: str, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Return all tensors of a logical file. `ArtifactShare` returns only one rank's heads of each tensor.

        On a CPU, tensors are views of the file's mapping, whose pages are read when accessed. On a GPU they are copies.

        Raises:
            ArtifactError: the file cannot be read, or a check of its first read fails. The class lists these checks.
        """
        what, first = self._named(name), name not in self._checked
        try:
            tensors = map_tensors(self.descriptor(name), what)
        except ArtifactError:
            self._check_sum(name)
            raise
        if first:
            self._check(name, self.manifest.files[name], tensors)
        own = {key: rows for key, one in tensors.items() if (rows := self._own_rows(name, key, one)) is not None}
        skipped = {key: tensors[key][: rows.start].nbytes for key, rows in own.items()}
        tensors |= {key: tensors[key][rows] for key, rows in own.items()}
        tensors = on_device(tensors, self.descriptor(name), what, device, skipped)
        doubted = bounds(tensors) if first else {}
        if self.thorough or state_tokens(name) is not None:
            doubted = tensors | doubted
        if first and (wrong := not_finite(doubted)):
            self._check_sum(name)
            raise ArtifactError(f"{wrong} in {what} holds numbers that are not finite; {REBUILD}")
        self._checked.add(name)
        return tensors

    def _own_rows(self, name: str, key: str, tensor: torch.Tensor) -> slice | None:
        """Return the slice of a tensor's first axis that `tensors` returns; None: the whole axis.

        Always returns None here. `ArtifactShare` overrides this method.

        Args:
            name: the logical file.
            key: the tensor's name in the file.
        """
        return None

    def heads_and_channels(self, layer: int) -> tuple[int, int]:
        """Return Hk and D of a layer's keys and values."""
        heads, _, channels = self.manifest.files[layer_file("context", layer)].tensors["keys"].shape
        return heads, channels

    def input_ids(self) -> torch.Tensor:
        """Read the token ids [N] int64 of the fixed prompt."""
        return self.tensors(TOKENS)["input_ids"]

    def context_rows(self, layer: int, device: torch.device = CPU) -> ContextRows:
        """Read a layer's keys and values as they are stored; mapped on a CPU, copied to a GPU."""
        return context_rows(self.tensors(layer_file("context", layer), device), getattr(torch, self.manifest.dtype))

    def context(self, layer: int, device: torch.device = CPU) -> Pair:
        """Read a layer's keys and values, each [Hk, N, D], in the index's dtype; int8 rows are dequantised copies."""
        return self.context_rows(layer, device).part(slice(None))

    def queries(self, layer: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Read a layer's held-out queries `tail` [Hq, R, D], and `sink_logits` [Hq] of a layer with attention sinks."""
        return self.tensors(layer_file("queries", layer), device)

    def method_tensors(self, method: str, layer: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Read the tensors that a method built for a layer. Raises KeyError if the index lacks the method."""
        return self.tensors(layer_file(method, layer), device)

    def state(self, tokens: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Read the recurrent and convolution states of the model's layers after the prompt's first `tokens` tokens.

        Returns an empty dict if no layer has a state.

        Raises:
            UsageError: layers have states, but none are stored after that many tokens.
        """
        if not self.manifest.states:
            return {}
        if tokens not in self.manifest.states:
            raise UsageError(
                f"the model has layers with a state, and {self.folder} stores no state after {tokens:,} tokens; states "
                f"are stored after {', '.join(f'{one:,}' for one in self.manifest.states)} tokens"
            )
        return self.tensors(state_file(tokens), device)

    def check_sums(self, names: Iterable[str]) -> None:
        """Check the sha256 of several files in parallel threads; their first reads then skip this check.

        Files whose checksum a first read would not check are skipped.

        Raises:
            ArtifactError: the content of a file has changed.
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
            self._check_sum(name)
            raise ArtifactError(f"{self._named(name)} holds other tensors than its manifest says; {REBUILD}")
        if name not in self._summed and self._is_summed(record):
            self._check_sum(name)

    def _is_summed(self, record: FileRecord) -> bool:
        small = record.bytes < self._layer_bytes
        return self.thorough or small or record.path.startswith(f"{STATES}/")

    def _check_sum(self, name: str) -> None:
        if hash_descriptor(self.descriptor(name)) != self.manifest.files[name].sha256:
            remedy = _remedy(self.folder, self.manifest, name)
            raise ArtifactError(f"{self._named(name)} is damaged: its sha256 does not match; {remedy}")
        self._summed.add(name)


class ArtifactShare(Artifact):
    """An open index whose tensors with a head axis, Hk or Hq, have only the heads of one rank.

    Readers see an index with fewer heads. `manifest` is the manifest of the whole index. On a CPU, tensors are views of
    the mapped files, as in the whole index.

    Args:
        whole: the whole index, whose open files this object reads, too.
        number: the rank, from 0 to `size` - 1.
        heads: the number of KV heads of a rank by layer. A rank with all heads of a layer reads all of them.

    Raises:
        ArtifactError: in a layer, `heads` is neither the index's number of KV heads nor this number divided by `size`.
    """

    def __init__(self, whole: Artifact, number: int, size: int, heads: Mapping[int, int]):
        self.folder, self.thorough, self.manifest = whole.folder, whole.thorough, whole.manifest
        self._snapshot, self._summed = whole._snapshot, whole._summed
        self._checked = set[str]()  # not shared with `whole`: only this rank's heads are checked
        self._parts = {layer: _part(whole, layer, number, size, heads[layer]) for layer in whole.manifest.attending}

    def heads_and_channels(self, layer: int) -> tuple[int, int]:
        heads, channels = super().heads_and_channels(layer)
        return heads // self._parts[layer][1], channels

    def _own_rows(self, name: str, key: str, tensor: torch.Tensor) -> slice | None:
        """Return the slice of this rank's heads; None for a tensor without a head axis.

        Raises:
            UsageError: the tensor's axes are unknown, as for a method of another package.
        """
        if name == TOKENS or state_tokens(name) is not None:
            return None
        folder, layer = name.split("/")
        place, parts = self._parts[_number(layer)]
        axis = first_axis(folder, key)
        if axis is None and parts > 1:
            raise UsageError(
                f"{key} of {folder} in {self.folder} cannot be split over ranks, because its axes are not known; "
                "use one process"
            )
        if axis not in ("Hk", "Hq"):
            return None
        heads = len(tensor) // parts
        return slice(place * heads, (place + 1) * heads)


def _part(whole: Artifact, layer: int, number: int, size: int, own: int) -> tuple[int, int]:
    """Return the index of a rank's part of a layer's heads, and the number of parts.

    The number of parts is `size`, or 1 if the rank has all heads of the layer. Raises ArtifactError if `own`, the
    rank's number of heads, is neither the number of all heads nor this number divided by `size`.
    """
    heads, _ = whole.heads_and_channels(layer)
    if own == heads:
        return 0, 1
    if own * size != heads:
        raise ArtifactError(
            f"{layer_file('context', layer)} of {whole.folder} has {heads} KV heads, and {size} ranks have {own} each: "
            f"it was built with another model; use that model, or {REBUILD}"
        )
    return number, size


def _number(file: str) -> int:
    return int(file.removeprefix("layer_").partition(".")[0])


class WholeFile:
    """A completely written safetensors file, open for reading as long as this object exists, even if it is removed.

    Args:
        descriptor: a descriptor of the file, which is opened again read-only.
        what: the file's name in messages.

    Raises:
        OSError: the file cannot be opened for reading.
    """

    def __init__(self, descriptor: int, what: str):
        self._descriptor, self._what = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC), what
        weakref.finalize(self, os.close, self._descriptor)

    def sha256(self) -> str:
        """Compute the file's sha256, in hex. Raises OSError if it cannot be read."""
        return hash_descriptor(self._descriptor)

    def read(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Read the file's tensors: mapped on a CPU, copied to a GPU. Raises ArtifactError if they cannot be read."""
        return on_device(map_tensors(self._descriptor, self._what), self._descriptor, self._what, device, {})


def find_whole(folder: Folder, shared: SharedFile) -> WholeFile:
    """Open a complete file of an index by another process's handle. Raises OSError if no file matches the handle."""
    descriptor = folder.open(shared.path)
    try:
        shared.check(descriptor)
        return WholeFile(descriptor, f"{shared.path} of {folder.path}")
    finally:
        os.close(descriptor)
