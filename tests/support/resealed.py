"""Changing an index as its author could: the manifest's own hash, and the sums of files, are right again after it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.schema import MANIFEST

Fields = dict[str, Any]


def reseal(folder: Path, edit: Callable[[Fields], object]) -> None:
    """Edit the fields of a manifest, and make its own hash right."""
    fields = json.loads((folder / MANIFEST).read_bytes())
    edit(fields)
    fields["manifest_sha256"] = hash_json({key: value for key, value in fields.items() if key != "manifest_sha256"})
    (folder / MANIFEST).write_text(json.dumps(fields))


def reseal_tensors(folder: Path, name: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Edit the tensors of a logical file, and make its record and the manifest's own hash right."""
    path = folder / json.loads((folder / MANIFEST).read_bytes())["files"][name]["path"]
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)
    data = path.read_bytes()
    record = {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "tensors": {
            key: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for key, tensor in tensors.items()
        },
    }
    reseal(folder, lambda fields: fields["files"][name].update(record))
