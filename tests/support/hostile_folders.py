"""Damage to an index's folder: links, pipes, folders and foreign files."""

import json
import os
import random
import shutil
from pathlib import Path

from sparsekv.formats.index.schema import MANIFEST

from .sealing import Damage, Damager, read_fields

TEMPORARY = (
    "manifest.json.tmp",
    "unfinished.json.tmp",
    "unfinished.json",
    ".lock",
    "tokens.safetensors.tmp",
)
"""Names of files that a writer may create."""
OUTSIDE = ("../.bashrc", "../notes.txt", "../layers/layer_000.safetensors", "../new file", "/dev/zero", "/dev/full")


def _some_name(index: Path, choose: random.Random) -> str:
    if choose.random() < 0.6:
        return choose.choice(TEMPORARY)
    return choose.choice(sorted(record["path"] for record in read_fields(index)["files"].values()))


def _clear(path: Path) -> None:
    path.unlink(missing_ok=True)


def link(index: Path, choose: random.Random) -> Damage:
    """Replace a file that is read or written by a link to another file."""
    name, target = _some_name(index, choose), choose.choice([*OUTSIDE, "itself"])
    path = index / name
    _clear(path)
    outside = target if target.startswith("/") else os.path.relpath(index / target, path.parent)
    path.symlink_to(path if target == "itself" else outside)
    return Damage(f"{name} is a link to {target}", sealed=True)


def link_to_itself_moved(index: Path, choose: random.Random) -> Damage:
    """Move a file or folder of the index, and leave a link to it."""
    names = sorted({Path(record["path"]).parts[0] for record in read_fields(index)["files"].values()})
    name = choose.choice([*names, "context/layer_001.safetensors"])
    moved = (index / name).rename(index.parent / "moved")
    (index / name).symlink_to(moved)
    return Damage(f"{name} is a link to where it was moved", sealed=True)


def folder_elsewhere(index: Path, choose: random.Random) -> Damage:
    """Replace a folder of the index by a link to another folder."""
    name = choose.choice(["context", "squeezed", "h2o", "queries"])
    shutil.rmtree(index / name)
    (index / name).symlink_to(choose.choice(["../layers", "../a model", "..", ".", "/tmp"]))
    return Damage(f"{name} is a link to {os.readlink(index / name)}", sealed=True)


def pipe(index: Path, choose: random.Random) -> Damage:
    """Replace a file that is read or written by a named pipe, which makes a process that opens it wait."""
    name = _some_name(index, choose)
    _clear(index / name)
    os.mkfifo(index / name)
    return Damage(f"{name} is a named pipe", sealed=True)


def folder_for_file(index: Path, choose: random.Random) -> Damage:
    """Replace a file that is read or written by a folder with a file in it."""
    name = _some_name(index, choose)
    _clear(index / name)
    (index / name).mkdir()
    (index / name / "mine.txt").write_text("mine")
    return Damage(f"{name} is a folder", sealed=True, foreign=(f"{name}/mine.txt",))


def lost(index: Path, choose: random.Random) -> Damage:
    """Delete a file or a folder."""
    names = sorted(record["path"] for record in read_fields(index)["files"].values())
    name = choose.choice([*names, "context", "squeezed", "queries", MANIFEST])
    if (index / name).is_dir():
        shutil.rmtree(index / name)
    else:
        (index / name).unlink()
    return Damage(f"{name} is lost", sealed=False)


def foreign(index: Path, choose: random.Random) -> Damage:
    """Add files to the folder that are not the index's."""
    files = {
        "talk.skv/manifest.json": (index / MANIFEST).read_bytes(),
        "talk.skv/tokens.safetensors": b"of a talk",
        "a model/model.safetensors": b"weights",
        "a model/empty/": b"",
        "context/mine.safetensors": b"mine",
        "squeezed/layer_000.old.safetensors": b"mine too",
        "notes.tmp": b"half a note",
        "x.safetensors": b"x",
        "download/x.tmp": b"half",
        "readme.txt": b"read me",
    }
    chosen = choose.sample(sorted(files), 4)
    for name in chosen:
        (index / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (index / name).mkdir(parents=True)
        else:
            (index / name).write_bytes(files[name])
    return Damage(f"{', '.join(chosen)} beside its own", sealed=True, foreign=tuple(chosen))


def journal(index: Path, choose: random.Random) -> Damage:
    """Write a build's journal that names files outside of the index, or is malformed."""
    records = read_fields(index)["files"]
    outside = {**records["tokens.safetensors"], "path": choose.choice(["../.bashrc", "/etc/passwd", "../a model", ""])}
    name = choose.choice(sorted(records))
    written = {
        "names files outside": json.dumps({"files": records | {name: outside}, "notes": {}}),
        "has odd notes": json.dumps({"files": records, "notes": {"context": "\x1b[31m", "probe": 3, "layers": []}}),
        "is nested": "[" * 200_000 + "]" * 200_000,
        "is no text": "\udcff",
        "is no object": choose.choice(["[]", "null", "3", '{"files": 3, "notes": 3}', '{"files": {}, "notes": []}']),
    }
    how = choose.choice(sorted(written))
    (index / "unfinished.json").write_bytes(written[how].encode(errors="surrogateescape"))
    if choose.random() < 0.3:
        (index / MANIFEST).unlink()
        how += ", and there is no manifest"
    return Damage(f"the journal {how}", sealed=True)


DAMAGERS: tuple[Damager, ...] = (
    link,
    foreign,
    pipe,
    journal,
    folder_for_file,
    link,
    link_to_itself_moved,
    lost,
    folder_elsewhere,
    foreign,
)
