"""Damage to an index's manifest: false values with a valid hash, or damaged bytes."""

import copy
import math
import os
import random
from pathlib import Path
from typing import Any

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.index.schema import MANIFEST

from .sealing import Damage, Damager, Fields, read_fields, seal

NUMBERS = (0, -1, 1, 3, 5000, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, math.nan, math.inf)
TEXTS = (
    "",
    "x" * 100_000,
    "../.bashrc",
    "/etc/passwd",
    "\x1b]0;owned\x07\x1b[31mred",
    "[bold]x[/red]",
    "$x^{",
    "\udcff\ud800",
    "a\x00b",
    "two\nlines\u2028three",
)
OTHERS: tuple[Any, ...] = (None, True, [], {}, [0] * 100_000, {"a": {"b": []}}, [[[[1]]]], ["../.bashrc"])
OUTSIDE = (
    "../.bashrc",
    "../notes.txt",
    "../a model/model.safetensors",
    "context/../../.bashrc",
    "../../doc.txt",
    MANIFEST,
    "/etc/passwd",
    "/dev/zero",
    "",
    ".",
    "..",
    "a\x00b",
    "x" * 300,
)


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return all fields as paths of keys; of a list, only the first and the last element."""
    found = [place] if place else []
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = sorted({0, len(value) - 1}) if isinstance(value, list) and value else []
    return found + [inner for key in keys for inner in _places(value[key], (*place, key))]


def _some_place(fields: Fields, choose: random.Random) -> tuple[Any, ...]:
    """Choose a field. All top-level fields are equally likely, because `files` has far more fields than the others."""
    top = choose.choice(sorted(name for name in fields if name != "manifest_sha256"))
    return choose.choice([place for place in _places(fields) if place[0] == top])


def _holder(fields: Fields, place: tuple[Any, ...]) -> Any:
    value: Any = fields
    for key in place[:-1]:
        value = value[key]
    return value


def other_value(index: Path, choose: random.Random) -> Damage:
    """Give any field another value."""
    fields = read_fields(index)
    place = _some_place(fields, choose)
    value = choose.choice(choose.choice((NUMBERS, TEXTS, OTHERS)))
    _holder(fields, place)[place[-1]] = value
    seal(index, fields)
    return Damage(f"{place} is {_shown(value)}", sealed=True)


def other_number(index: Path, choose: random.Random) -> Damage:
    """Give a number another value."""
    fields = read_fields(index)
    places = [p for p in _places(fields) if isinstance(_holder(fields, p)[p[-1]], int | float)]
    top = choose.choice(sorted({place[0] for place in places}))
    place, value = choose.choice([place for place in places if place[0] == top]), choose.choice(NUMBERS)
    _holder(fields, place)[place[-1]] = value
    seal(index, fields)
    return Damage(f"{place} is {value}", sealed=True)


def other_split(index: Path, choose: random.Random) -> Damage:
    """Change the sizes of sinks, middle and tail, with the same sum or another one."""
    fields = read_fields(index)
    tokens, name = fields["prompt"]["tokens"], choose.choice(["sinks", "middle", "tail"])
    fields["split"][name] = choose.choice([0, -1, 1, 7, tokens, 5000, 2**31, 2**62])
    if choose.random() < 0.5:
        rest = "middle" if name != "middle" else "sinks"
        fields["split"][rest] += tokens - sum(fields["split"].values())
    seal(index, fields)
    return Damage(f"split is {fields['split']}", sealed=True)


def no_field(index: Path, choose: random.Random) -> Damage:
    """Remove, rename or empty a field."""
    fields = read_fields(index)
    place = _some_place(fields, choose)
    holder, key = _holder(fields, place), place[-1]
    how = choose.choice(["gone", "renamed", "emptied"])
    value = holder[key]
    if how == "emptied" and isinstance(value, list | dict | str):
        holder[key] = type(value)()
    else:
        del holder[key]
    if how == "renamed" and isinstance(holder, dict):
        holder[f"{key}x"] = value
    seal(index, fields)
    return Damage(f"{place} is {how}", sealed=True)


def file_elsewhere(index: Path, choose: random.Random) -> Damage:
    """Make a record name a file outside of the index, with that file's size and checksum."""
    fields, path = read_fields(index), choose.choice(OUTSIDE)
    name = choose.choice([*sorted(fields["files"]), "../../evil", "/evil", "readme/layer_000.safetensors"])
    record = fields["files"].setdefault(name, copy.deepcopy(fields["files"]["tokens.safetensors"]))
    record["path"] = path
    target = index / path if "\0" not in path and len(path) < 255 else index
    if target.is_file():
        data = target.read_bytes()
        record |= {"bytes": len(data), "sha256": hash_bytes(data)}
    seal(index, fields)
    return Damage(f"{name} lies at {_shown(path)}", sealed=True)


def file_of_another(index: Path, choose: random.Random) -> Damage:
    """Replace a file's record by another file's record, or exchange the two records."""
    fields = read_fields(index)
    files = fields["files"]
    one, other = choose.sample(sorted(files), 2)
    how = choose.choice(["is a copy of", "changes with"])
    files[one], files[other] = files[other], files[one] if how == "changes with" else files[other]
    seal(index, fields)
    return Damage(f"record {one} {how} {other}", sealed=True)


def other_methods(index: Path, choose: random.Random) -> Damage:
    """Exchange two methods, rename a method, remove it, or change one of its parameters."""
    fields = read_fields(index)
    methods = fields["methods"]
    one, other = choose.sample(sorted(methods), 2)
    invented = choose.choice(["nonesuch", "oracle", "quest", "../x", "", "\x1b[31m", "[/x]"])
    how = choose.choice(["swapped", "invented", "dropped", "odd"])
    if how == "swapped":
        methods[one], methods[other] = methods[other], methods[one]
    elif how == "odd":
        methods[one]["parameters"][choose.choice([invented, "seed", "levels"])] = choose.choice([*NUMBERS, *TEXTS])
    else:
        taken = methods.pop(one)
        methods |= {invented: taken} if how == "invented" else {}
    seal(index, fields)
    return Damage(f"method {one} is {how} ({other}, {_shown(invented)})", sealed=True)


def other_layers(index: Path, choose: random.Random) -> Damage:
    """Add or remove layers, or give layers a sliding window."""
    fields = read_fields(index)
    layers = fields["layers"]
    how = choose.choice(["one more", "one less", "none", "a thousand", "all slide", "one slides"])
    if how in ("one more", "a thousand"):
        layers += [copy.deepcopy(layers[0]) for _ in range(1 if how == "one more" else 1000)]
    elif how in ("one less", "none"):
        del layers[0 if how == "none" else -1 :]
    else:
        for layer in layers if how == "all slide" else layers[1:2]:
            layer["sliding_window"] = choose.choice([0, -1, 1, 32, 2**63])
    seal(index, fields)
    return Damage(f"layers: {how}", sealed=True)


def nested(index: Path, choose: random.Random) -> Damage:
    """Nest JSON in many levels, in a field with a valid hash or as the whole manifest."""
    if choose.random() < 0.5:
        (index / MANIFEST).write_text("[" * 200_000 + "]" * 200_000)
        return Damage("200,000 levels of JSON", sealed=False)
    fields, value = read_fields(index), []  # type: ignore[var-annotated]
    for _ in range(400):
        value = [value]
    fields["rope"]["parameters"] = {"factor": value}
    seal(index, fields)
    return Damage("400 levels of JSON in rope", sealed=True)


def damaged_bytes(index: Path, choose: random.Random) -> Damage:
    """Damage the manifest's bytes, so that its hash is wrong."""
    path = index / MANIFEST
    data = bytearray(path.read_bytes())
    place, how = choose.randrange(len(data)), choose.choice(["flipped", "cut", "empty", "not text", "other JSON"])
    if how == "flipped":
        data[place] ^= 1 << choose.randrange(8)
    other = choose.choice([b"null", b"[]", b"{}", b"3", b'"text"', b'{"least_reader_version": "a"}', b"NaN"])
    written = {"cut": data[:place], "empty": b"", "not text": b"\xff\xfe" * 50, "other JSON": other}
    path.write_bytes(written.get(how, data))
    return Damage(f"manifest {how} at byte {place} ({other!r})", sealed=False)


def not_a_file(index: Path, choose: random.Random) -> Damage:
    """Replace the manifest by a folder, a pipe or a link, or remove it."""
    path, how = index / MANIFEST, choose.choice(["folder", "pipe", "link to it", "link", "loop", "endless", "gone"])
    moved = path.rename(index.parent / "moved.json")
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how != "gone":
        target = {"link to it": moved, "link": index.parent / ".bashrc", "loop": path, "endless": Path("/dev/zero")}
        path.symlink_to(target[how])
    return Damage(f"manifest is a {how}", sealed=False)


def least_reader(index: Path, choose: random.Random) -> Damage:
    """Set a version of the schema that does not exist."""
    fields = read_fields(index)
    name, value = choose.choice(["schema_version", "least_reader_version"]), choose.choice([*NUMBERS, *TEXTS, *OTHERS])
    fields[name] = value
    seal(index, fields)
    return Damage(f"{name} is {_shown(value)}", sealed=True)


DAMAGERS: tuple[Damager, ...] = (
    other_value,
    file_elsewhere,
    other_number,
    other_split,
    damaged_bytes,
    other_methods,
    no_field,
    not_a_file,
    other_value,
    file_of_another,
    other_layers,
    nested,
    other_number,
    least_reader,
)
