"""Changes of an index's files from outside, with all hashes and checksums corrected, as an attacker may make them."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from sparsekv.formats.checksums import hash_bytes, hash_json
from sparsekv.formats.index.schema import MANIFEST

Fields = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Damage:
    """Description of damage to an index, for a failure's message.

    `sealed` is True if every hash and checksum is correct again. `foreign` are paths in the index that are not its own,
    so no command may touch them.
    """

    what: str
    sealed: bool
    foreign: tuple[str, ...] = ()


Damager = Callable[[Path, random.Random], Damage]
"""Function that damages the index in a folder, in a way that a random generator chooses."""


def read_fields(index: Path) -> Fields:
    """Return the manifest's fields."""
    fields: Fields = json.loads((index / MANIFEST).read_bytes())
    return fields


def seal(index: Path, fields: Fields) -> None:
    """Write a manifest with any fields, and with their hash."""
    fields = {name: value for name, value in fields.items() if name != "manifest_sha256"}
    (index / MANIFEST).write_text(json.dumps({**fields, "manifest_sha256": hash_json(fields)}, indent=1))


def reseal(index: Path, change: Callable[[Fields], object]) -> None:
    """Change the fields of a manifest, and correct its hash."""
    fields = read_fields(index)
    change(fields)
    seal(index, fields)


def record_file(index: Path, fields: Fields, name: str) -> None:
    """Update a file's record to the file's present content."""
    record = fields["files"][name]
    data = (index / record["path"]).read_bytes()
    record |= {"bytes": len(data), "sha256": hash_bytes(data)}
    try:
        tensors = load_file(index / record["path"])
    except (SafetensorError, OSError, ValueError):
        return
    record["tensors"] = {
        key: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for key, tensor in tensors.items()
    }


def change_tensors(index: Path, name: str, change: Callable[[Tensors], Tensors]) -> None:
    """Write one logical file with other tensors, and correct the manifest."""
    fields = read_fields(index)
    path = index / fields["files"][name]["path"]
    save_file(change(load_file(path)), path)
    record_file(index, fields, name)
    seal(index, fields)


def change_bytes(index: Path, name: str, change: Callable[[bytearray], bytearray], *, sealed: bool) -> None:
    """Write one logical file with other bytes; if `sealed`, also correct the manifest."""
    fields = read_fields(index)
    path = index / fields["files"][name]["path"]
    path.write_bytes(change(bytearray(path.read_bytes())))
    if sealed:
        record_file(index, fields, name)
        seal(index, fields)


def header_bytes(path: Path) -> int:
    """Return the number of bytes before the tensors' data."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def tensor_names(index: Path, name: str) -> list[str]:
    """Return the names of the tensors in a logical file."""
    with safe_open(index / read_fields(index)["files"][name]["path"], framework="pt") as file:
        return sorted(file.keys())
