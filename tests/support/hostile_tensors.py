"""Damage to an index's files of tensors."""

import random
from collections.abc import Callable
from pathlib import Path

import torch

from .sealing import (
    Damage,
    Damager,
    Tensors,
    change_bytes,
    change_tensors,
    header_bytes,
    read_fields,
    seal,
    tensor_names,
)

FILLS = ("zeros", "ones", "minus one", "largest", "smallest", "nan", "inf", "random", "reversed")


FileDamager = Callable[[Path, random.Random, str], Damage]
"""Function that damages a logical file, given the file's name."""


def _some_file(index: Path, choose: random.Random) -> str:
    """Choose a logical file; all folders are equally likely."""
    files = sorted(read_fields(index)["files"])
    folder = choose.choice(sorted({name.split("/")[0] for name in files}))
    return choose.choice([name for name in files if name.split("/")[0] == folder])


def flip_data(index: Path, choose: random.Random, name: str = "") -> Damage:
    """Flip one bit of a tensor's data."""
    return flip_bit(index, name or _some_file(index, choose), choose, sealed=choose.random() < 0.5)


def flip_bit(index: Path, name: str, choose: random.Random, *, sealed: bool) -> Damage:
    """Flip one bit of the data of a logical file."""
    path = index / read_fields(index)["files"][name]["path"]
    place = choose.randrange(header_bytes(path), path.stat().st_size)
    return _flip(index, name, place, choose.randrange(8), sealed=sealed)


def flip_header(index: Path, choose: random.Random, name: str = "") -> Damage:
    """Flip one bit of a file's header, which has the tensors' names, shapes and dtypes."""
    name = name or _some_file(index, choose)
    place = choose.randrange(header_bytes(index / read_fields(index)["files"][name]["path"]))
    return _flip(index, name, place, choose.randrange(8), sealed=choose.random() < 0.5)


def _flip(index: Path, name: str, place: int, bit: int, *, sealed: bool) -> Damage:
    def change(data: bytearray) -> bytearray:
        data[place] ^= 1 << bit
        return data

    change_bytes(index, name, change, sealed=sealed)
    return Damage(f"bit {bit} of byte {place} of {name}", sealed)


def other_size(index: Path, choose: random.Random, name: str = "") -> Damage:
    """Make a file shorter or longer."""
    name, sealed = name or _some_file(index, choose), choose.random() < 0.5
    share, more = choose.choice([0.0, 0.001, 0.5, 0.999, 1.0]), choose.choice([0, 1, 8, 4096])
    change_bytes(index, name, lambda data: data[: int(share * len(data))] + b"\1" * more, sealed=sealed)
    return Damage(f"{share:.1%} of {name} and {more} bytes more", sealed)


def swapped_files(index: Path, choose: random.Random, name: str = "") -> Damage:
    """Exchange the contents of two files, with or without their records."""
    fields = read_fields(index)
    files = fields["files"]
    one = name or _some_file(index, choose)
    layers = [name for name in sorted(files) if name.split("/")[0] == one.split("/")[0] and name != one]
    other = choose.choice(layers or sorted(files)) if choose.random() < 0.7 else _some_file(index, choose)
    first, second = index / files[one]["path"], index / files[other]["path"]
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    sealed = choose.random() < 0.5
    if sealed:
        paths = files[one]["path"], files[other]["path"]
        files[one], files[other] = files[other] | {"path": paths[0]}, files[one] | {"path": paths[1]}
        seal(index, fields)
    return Damage(f"{one} is swapped with {other}", sealed)


def other_tensors(index: Path, choose: random.Random, name: str = "") -> Damage:
    """Remove a tensor, or give it another name, shape or dtype."""
    name = name or _some_file(index, choose)
    key, how = choose.choice(tensor_names(index, name)), choose.choice([*SHAPES, "gone", "renamed", "dtype"])
    dtype = choose.choice([torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])

    def change(tensors: Tensors) -> Tensors:
        tensor = tensors.pop(key)
        if how == "gone":
            return tensors
        if how == "dtype":
            return tensors | {key: tensor.to(dtype)}
        return tensors | {f"{key}x" if how == "renamed" else key: reshaped(tensor, how).contiguous()}

    change_tensors(index, name, change)
    return Damage(f"{key} of {name}: {how} ({dtype})", sealed=True)


SHAPES = ("flat", "one row less", "twice", "transposed", "empty", "scalar", "one dimension more")


def reshaped(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """Return a tensor in another shape, by the shape's name in SHAPES or by its first axis."""
    shaped = {
        "flat": lambda: tensor.flatten(),
        "one row less": lambda: tensor[..., :-1],
        "twice": lambda: torch.cat([tensor, tensor], -1),
        "transposed": lambda: tensor.mT if tensor.ndim > 1 else tensor[None],
        "empty": lambda: tensor[..., :0],
        "scalar": lambda: tensor.flatten()[0],
        "one dimension more": lambda: tensor[None],
        "one number": lambda: tensor[(slice(1),) * tensor.ndim],
        "two sequences": lambda: torch.cat([tensor, tensor]),
    }
    return shaped[how]().clone() if how in shaped else tensor


def filled(index: Path, choose: random.Random, name: str = "") -> Damage:
    """Replace some or all numbers of a tensor; all checksums are valid."""
    name = name or _some_file(index, choose)
    key, how = choose.choice(tensor_names(index, name)), choose.choice(FILLS)
    share = choose.choice([1.0, 0.3, 0.001])
    generator = torch.Generator().manual_seed(choose.randrange(2**31))

    def change(tensors: Tensors) -> Tensors:
        tensor = tensors[key]
        chosen = torch.rand(tensor.shape, generator=generator) < share
        if not chosen.any():
            chosen.view(-1)[0] = True
        return tensors | {key: torch.where(chosen, _fill(tensor, how, generator), tensor)}

    change_tensors(index, name, change)
    return Damage(f"{share:.1%} of {key} of {name} is {how}", sealed=True)


def _fill(tensor: torch.Tensor, how: str, generator: torch.Generator) -> torch.Tensor:
    if how == "random":
        return torch.randint(0, 100, tensor.shape, generator=generator).to(tensor.dtype)
    if how == "reversed":
        return tensor.flip(-1)
    floating = tensor.is_floating_point()
    limits = torch.finfo(tensor.dtype) if floating else torch.iinfo(tensor.dtype)
    values = {
        "zeros": 0,
        "ones": 1,
        "minus one": -1 if limits.min < 0 else limits.max,
        "largest": limits.max,
        "smallest": limits.min,
        "nan": float("nan") if floating else limits.max,
        "inf": float("inf") if floating else limits.min,
    }
    return torch.full_like(tensor, values[how])


DAMAGERS: tuple[Damager, ...] = (
    flip_data,
    filled,
    other_tensors,
    flip_header,
    filled,
    swapped_files,
    flip_data,
    other_tensors,
    other_size,
    filled,
)
