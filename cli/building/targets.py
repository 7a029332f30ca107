"""Which documents are indexed, and the folder of each one's index."""

import codecs
import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsekv.formats.documents.text_source import read_bytes
from sparsekv.formats.errors import UsageError
from sparsekv.formats.hints import TEXT_ENDINGS
from sparsekv.formats.index_name import ENDING, has_extension, with_ending
from sparsekv.formats.schema import MANIFEST

_LONGEST_NAME = 255  # bytes of a file's name
_LONGEST_LIST = 2**26  # bytes: more would be a device that never ends


@dataclass(frozen=True)
class Target:
    """A document, as it was named, and the folder that its index goes to."""

    document: str
    folder: Path


def choose_targets(documents: Sequence[str], from_file: str | None, output: Path | None) -> list[Target]:
    """The documents that were named, once each, with the folders of their indices.

    Args:
        from_file: a file with the names of more documents, one a line; `-` for standard input.
        output: the folder of the index, or, where several documents may be named, the folder that their indices go to.

    Raises:
        UsageError: no document; two whose indices have one name; a document without a name, or with one too long; or
            `output` cannot hold several indices.
        SparsekvError: `from_file` cannot be read.
    """
    listed = [] if from_file is None else _names(from_file)
    named = _once([*documents, *listed])
    if not named:
        what = "name a text file, or - for standard input"
        if from_file is not None:
            listed_in = "standard input" if from_file == "-" else from_file
            what = f"{listed_in} has no names; put one a line there"
        raise UsageError(f"no document to index: {what}")
    if listed and not any(os.path.exists(one) for one in listed):
        raise UsageError(
            f"no line of {from_file} names a file that is there; a document itself is given without --from-file"
        )
    for one in named:
        if one.endswith(ENDING) and not os.path.exists(one):
            raise UsageError(
                f"no such file: {one}; an index that is there takes more methods, and one to build is named by an "
                f"option: -o {shlex.quote(one)}"
            )
    if len(named) == 1 and from_file is None:
        return [Target(named[0], output or folder_of(named[0]))]
    if from_file == "-" and "-" in named:
        raise UsageError("standard input has the list of documents, so that it cannot be one of them; name a file")
    if "-" in named:
        raise UsageError("a document from standard input has no name: index it by itself, with --output NAME.skv")
    _check_holds_several(output, {Path(one).suffix for one in named if has_extension(Path(one))})
    return _apart([Target(one, folder_of(one, output)) for one in named])


def folder_of(document: str, parent: Path | None = None) -> Path:
    """The folder of a document's index: its name with the ending .skv, beside it or in `parent`.

    Raises:
        UsageError: it has no name, or one that is too long with that ending.
    """
    if document == "-":
        raise UsageError("a document from standard input has no name: name the index with --output NAME.skv")
    if not Path(document).name:
        raise UsageError(f"{document} is a folder; name a text file in it")
    beside = with_ending(Path(document))
    # A name that is too long itself is told when it is opened.
    if len(os.fsencode(Path(document).name)) <= _LONGEST_NAME < len(os.fsencode(beside.name)):
        raise UsageError(f"{document}: its name is too long for one with .skv; name the index with --output NAME.skv")
    return beside if parent is None else parent / beside.name


def _names(from_file: str) -> list[str]:
    # File names may be any bytes.
    list_of_them = read_bytes(from_file, most=_LONGEST_LIST, option="--from-file").removeprefix(codecs.BOM_UTF8)
    lines = (line.removesuffix("\r") for line in os.fsdecode(list_of_them).split("\n"))
    return [_as_written(line) for line in lines if line.strip()]


def _as_written(line: str) -> str:
    """The name in a line. Blanks around it are a part of it where such a file is there, or none is without them."""
    return line.strip() if not os.path.lexists(line) and os.path.lexists(line.strip()) else line


def _once(names: Sequence[str]) -> list[str]:
    """The names, without those that spell the path of an earlier one in another way, such as `a.txt` and `./a.txt`."""
    paths: dict[str, str] = {}
    for one in names:
        paths.setdefault(_place(one), one)
    return list(paths.values())


def _place(name: str) -> str:
    """The folder that a name leads to, through links too, and the name in it. No file's name has a zero byte."""
    folder, base = os.path.split(name)
    return name if name == "-" or "\0" in name else os.path.join(os.path.realpath(folder), base)


def _check_holds_several(output: Path | None, extensions: Collection[str]) -> None:
    """Raise UsageError for what is no folder of several indices: an index, a file, or a new name like a document's."""
    if output is None or (output.is_dir() and output.suffix != ENDING and not os.path.exists(output / MANIFEST)):
        return
    texts = {*extensions, *(Path(ending).suffix for ending in TEXT_ENDINGS)} - {""}
    if output.suffix in {ENDING, *texts} or output.exists():
        folder = output.with_suffix("")
        instead = "such as -o indices" if folder.exists() else f"such as -o {shlex.quote(str(folder))}"
        that = "it is an index, but " if (output / MANIFEST).exists() else ""
        raise UsageError(
            f"--output {output}: {that}each of several documents has an index of its own; name the folder that they go "
            f"to, {instead}"
        )


def _apart(targets: list[Target]) -> list[Target]:
    """The targets unchanged, if no two go to one folder."""
    taken: dict[Path, str] = {}
    for one in targets:
        if (other := taken.setdefault(one.folder.absolute(), one.document)) != one.document:
            raise UsageError(
                f"{other} and {one.document} would both be indexed in {one.folder}; build one of them by itself, with "
                "--output NAME.skv"
            )
    return targets
