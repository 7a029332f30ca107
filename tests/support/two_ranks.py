"""The same indices and answers by one process and by two ranks."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv.cli.building.recipe import Target
from sparsekv.formats.distributed.process import FOLDER
from sparsekv.formats.index.manifest import read_manifest
from sparsekv.formats.index.schema import AUTO

from . import rank_job
from .causal_families import save_family
from .forked import zygote
from .small_index import without_window

DOCUMENT = "".join(f"Line {number} says that {number} times {number} is {number * number}.\n" for number in range(12))
FRESH = ["multipole", "codes", "squeezed", "dense"]
"""A method that needs no queries, one that needs queries, one with a calibration, and one without an index."""


@dataclass(frozen=True)
class Both:
    """Results of one process and of two ranks.

    `folder` has the indices `FAMILY-alone.skv` and `FAMILY-ranks.skv`. `alone` and `ranks` are the answers of one
    process and of the ranks over both indices, by "FAMILY alone|ranks METHOD". `deeds` counts each rank's work in the
    builds, as `Deeds` does.
    """

    folder: Path
    alone: dict[str, Any]
    ranks: dict[str, Any]
    deeds: list[dict[str, int]]


def run_both(
    folder: Path,
    families: list[str],
    methods: list[str],
    kv_dtype: str = AUTO,
    *,
    apart: bool = False,
    resumed: bool = False,
) -> Both:
    """Build and answer by one process and by two ranks.

    Args:
        apart: the second rank does not find the index by the first rank's path.
        resumed: the ranks begin with the one process's index, without its methods' files.
    """
    (folder / "doc.txt").write_text(DOCUMENT)
    for family in families:
        _save(family, folder / family)
        recipe = rank_job.recipe(folder / family, methods, kv_dtype)
        target = Target(str(folder / "doc.txt"), folder / f"{family}-alone.skv")
        recipe.index(target, recipe.load, lambda stage, done, of: None)
        if resumed:
            without_methods(target.folder, folder / f"{family}-ranks.skv")
    _run_ranks(folder, ",".join(families), ",".join(methods), kv_dtype, apart=apart)
    return Both(
        folder,
        rank_job.answers(folder, families, methods, None),
        json.loads((folder / "answers.json").read_text()),
        [json.loads((cwd / f"deeds-{number}.json").read_text()) for number, cwd in enumerate(_homes(folder))],
    )


def _save(family: str, folder: Path) -> None:
    save_family(folder, family)
    if family == "mistral":
        without_window(family).save_pretrained(folder)


def without_methods(index: Path, copy: Path) -> None:
    """Copy an index without its methods' files."""
    shutil.copytree(index, copy)
    for method in read_manifest(index).methods:
        shutil.rmtree(copy / method)


def _homes(folder: Path) -> tuple[Path, Path]:
    """Return the ranks' current folders."""
    return folder, folder / "meeting"


def _run_ranks(folder: Path, *arguments: str, apart: bool) -> None:
    meeting = folder / "meeting"
    meeting.mkdir()
    own = {FOLDER: str(meeting), "WORLD_SIZE": "2"}
    first, second = _homes(folder)
    places = (first, "." if apart else folder, second, folder)
    limits = {"AS": 1 << 40}
    given = {"folder": folder, "environment": own, "limits": limits, "seconds": 600}
    done = zygote().run(*arguments, *places, program=rank_job.__name__, **given)
    assert done.code == 0, done.stderr
