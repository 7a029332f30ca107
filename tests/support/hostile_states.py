"""Damage to an index's files of layer states."""

import random
from pathlib import Path

import torch

from sparsekv.formats.index.schema import STATES

from . import hostile_tensors
from .sealing import Damage, Damager, Tensors, change_tensors, read_fields, seal, tensor_names

NAMES = (
    "layer_000.conv_99",
    "layer_000.recurrent_7",
    "layer_003.conv_0",
    "layer_099.conv_0",
    "layer_000.conv_-1",
    "layer_00a.conv_0",
    "../layer_000.conv_0",
    "keys",
    "x" * 300,
)
PLACES = ("0000000001", "0000099999", "9999999999", "00000000001", "-000000001", "000000001x", "../../0000000001", "")


def state_files(index: Path) -> list[str]:
    """Return the logical names of an index's files of states, in order."""
    return sorted(name for name in read_fields(index)["files"] if name.startswith(f"{STATES}/"))


def _everywhere(index: Path, choose: random.Random, how: str) -> Damage:
    """Change a tensor in all files of states in the same way, so that the files agree."""
    files = state_files(index)
    key, other = choose.choice(tensor_names(index, files[0])), choose.choice(NAMES)
    dtype = choose.choice([torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
    shape = choose.choice([*hostile_tensors.SHAPES, "one number", "two sequences"])

    def change(tensors: Tensors) -> Tensors:
        tensor = tensors[key]
        if how == "more":
            return tensors | {other: tensor.clone()}
        if how == "dtype":
            return tensors | {key: tensor.to(dtype)}
        del tensors[key]
        if how == "shape":
            return tensors | {key: hostile_tensors.reshaped(tensor, shape).contiguous()}
        return tensors | ({other: tensor} if how == "renamed" else {})

    for name in files:
        change_tensors(index, name, change)
    return Damage(f"{key} of all states: {how} ({shape}, {dtype}, {other[:30]})", sealed=True)


def renamed(index: Path, choose: random.Random) -> Damage:
    """Remove or rename a tensor of all states, or add one."""
    return _everywhere(index, choose, choose.choice(["gone", "renamed", "more"]))


def other_form(index: Path, choose: random.Random) -> Damage:
    """Give a tensor of all states another shape or dtype."""
    return _everywhere(index, choose, choose.choice(["shape", "shape", "dtype"]))


def elsewhere(index: Path, choose: random.Random) -> Damage:
    """Give a state's record another number of tokens, or add another record of the state."""
    fields = read_fields(index)
    files = fields["files"]
    name, other = choose.choice(state_files(index)), f"{STATES}/token_{choose.choice(PLACES)}.safetensors"
    how = choose.choice(["is", "is also"])
    files[other] = files[name]
    if how == "is":
        del files[name]
    seal(index, fields)
    return Damage(f"{name} {how} {other}", sealed=True)


def gone(index: Path, choose: random.Random) -> Damage:
    """Delete one state or all states, with or without their records."""
    fields = read_fields(index)
    names = choose.choice([state_files(index), [choose.choice(state_files(index))]])
    sealed = choose.random() < 0.5
    for name in names:
        (index / fields["files"][name]["path"]).unlink()
        if sealed:
            del fields["files"][name]
    if sealed:
        seal(index, fields)
    return Damage(f"{len(names)} states are gone, {names[-1]} among them", sealed)


def _of_states(damager: hostile_tensors.FileDamager) -> Damager:
    return lambda index, choose: damager(index, choose, choose.choice(state_files(index)))


DAMAGERS: tuple[Damager, ...] = (
    _of_states(hostile_tensors.filled),
    other_form,
    renamed,
    _of_states(hostile_tensors.other_size),
    elsewhere,
    gone,
    _of_states(hostile_tensors.flip_header),
    _of_states(hostile_tensors.other_tensors),
    _of_states(hostile_tensors.swapped_files),
    other_form,
    _of_states(hostile_tensors.flip_data),
    _of_states(hostile_tensors.filled),
)
