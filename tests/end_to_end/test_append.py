"""A document taken in piece by piece is one index: the same tokens, whole, and recalled as well as built at once."""

import json
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from support.command import sparsekv

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel

BOTH = 6144
BETWEEN = "\n\n"

Recall = dict[tuple[str, str], float]


def _run(*arguments: str | Path, cwd: Path) -> str:
    done = sparsekv(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _build(place: Path, document: str, methods: list[str]) -> None:
    built = [part for name in methods for part in ("--method", name)]
    _run("build-index", document, *built, "--block", "2048", cwd=place)


def _last_paragraph(embedded: LoadedModel, text: str, tokens: int) -> int:
    """Where the last paragraph that ends within some tokens of a text ends: `append` puts a blank line behind it."""
    offsets = embedded.tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text.rindex(BETWEEN, 0, int(offsets[tokens][0]))


@pytest.fixture(scope="module")
def place(embedded: LoadedModel, document: Path) -> Path:
    """`both.txt`, which the tests cut in two, and the index of all of it."""
    place = document.parent / "appended"
    with FileLock(f"{place}.lock"):
        if not (place / "both.skv" / "manifest.json").exists():
            place.mkdir(exist_ok=True)
            text = document.read_text(encoding="utf-8")
            (place / "both.txt").write_text(text[: _last_paragraph(embedded, text, BOTH)], encoding="utf-8")
            _build(place, "both.txt", ["multipole", "squeezed"])
    return place


def _recall(index: Path) -> Recall:
    """Recall at 5% of every method and variant that an index has."""
    report = json.loads(_run("recall-report", "-i", index, "--budget", "5%", "--json", cwd=index.parent))
    return {(row["method"], row["variant"]): row["recall"] for row in report["rows"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "added", "methods", "options"),
    [
        (4096, 2048, ["multipole"], []),
        (5900, 256, ["multipole"], []),
        (4096, 2048, ["multipole", "squeezed"], ["--rebuild"]),
    ],
    ids=["the last block anew", "a few tokens joining", "squeezed built again"],
)
def test_recall_is_that_of_building_both_at_once(
    place: Path,
    embedded: LoadedModel,
    tmp_path: Path,
    first: int,
    added: int,
    methods: list[str],
    options: list[str],
) -> None:
    """A text of about so many tokens, to which so many are added at most."""
    text, index = (place / "both.txt").read_text(encoding="utf-8"), tmp_path / "first.skv"
    cut = _last_paragraph(embedded, text, first)
    (tmp_path / "first.txt").write_text(text[:cut], encoding="utf-8")
    (tmp_path / "more.txt").write_text(text[cut + len(BETWEEN) :], encoding="utf-8")
    _build(tmp_path, "first.txt", methods)
    before = len(Artifact(index).input_ids())
    _run("append", "more.txt", *options, cwd=tmp_path)
    assert json.loads(_run("inspect", "--verify", "--json", cwd=tmp_path))["verified"]
    ids = Artifact(index).input_ids()
    assert torch.equal(ids, Artifact(place / "both.skv").input_ids())
    assert added // 2 < len(ids) - before <= added
    grown, whole = _recall(index), _recall(place / "both.skv")
    assert {name for name, _ in grown} >= {*methods}
    for row, recall in grown.items():
        assert recall == pytest.approx(whole[row], abs=0.02), row
