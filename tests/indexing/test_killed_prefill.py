"""A prefill that was killed goes on from its last whole chunk, and gives the index of one that was not."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.causal_families import tiny_config, tiny_model
from support.small_index import INDEXERS, prefilled, recorded_attention, small_plan, with_changes

from sparsekv.formats.index.kept_prefill import prefill_note
from sparsekv.formats.index.manifest import JOURNAL
from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.build import build_index
from sparsekv.indexing.plan import BuildPlan, Progress
from sparsekv.indexing.prefill.prefills import QuokaPrefill

CHUNK, TOKENS = 64, 300
METHODS = {name: INDEXERS[name] for name in ("multipole", "codes")}


def _plan(family: str = "llama", **changes: Any) -> BuildPlan:
    return small_plan(family, **{"tokens": TOKENS, "methods": METHODS, "chunk_size": CHUNK, **changes})


def _noted(folder: Path) -> int:
    """The number of tokens that an interrupted build has left."""
    if not (folder / JOURNAL).exists():
        return 0
    note = prefill_note(json.loads((folder / JOURNAL).read_text())["notes"].get("prefill"))
    return note.ends[-1] if note else 0


def _killed(plan: BuildPlan, folder: Path, progress: Progress, seconds: float | None = None) -> None:
    """Build in another process, which ends by SIGKILL. It has no threads of torch, whose pool no fork inherits."""
    process = multiprocessing.get_context("fork").Process(target=_alone, args=(plan, folder, progress))
    process.start()
    if seconds is not None:
        time.sleep(seconds)
        process.kill()
    process.join(60)
    assert process.exitcode in (-signal.SIGKILL, *([] if seconds is None else [0]))


def _alone(plan: BuildPlan, folder: Path, progress: Progress) -> None:
    torch.set_num_threads(1)
    build_index(plan, folder, progress)


def _after(tokens: int, folder: Path, stage: str = "prefill") -> Progress:
    """Kill the process once these tokens are prefilled and on disk."""

    def progress(now: str, done: int, of: int) -> None:
        if (now, done) == (stage, tokens):
            while stage == "prefill" and _noted(folder) < tokens:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


def _left(plan: BuildPlan, folder: Path, tokens: int = 2 * CHUNK) -> None:
    _killed(plan, folder, _after(tokens, folder))
    assert _noted(folder) == tokens


def _sums(folder: Path) -> dict[str, str]:
    artifact = Artifact(folder)
    list(artifact.verify())
    return {name: record.sha256 for name, record in artifact.manifest.files.items()}


def _rebuilt(plan: BuildPlan, folder: Path) -> tuple[int, list[str]]:
    """Build to the end; return the number of tokens that were prefilled, and the lines that were told."""
    told: list[str] = []
    with recorded_attention(plan.loaded.model) as outputs:
        build_index(plan, folder, tell=told.append)
    assert not [path for path in folder.rglob("*") if path.name == JOURNAL or path.suffix == ".tmp"]
    return prefilled(outputs), told


def _fresh(plan: BuildPlan, folder: Path) -> dict[str, str]:
    build_index(plan, folder)
    return _sums(folder)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        pytest.param("gemma3", {}, marks=pytest.mark.slow),
        pytest.param("gpt-oss", {}, marks=pytest.mark.slow),
        ("llama", {"prefill": QuokaPrefill(prefill_budget=32, prefill_queries=4)}),
    ],
    ids=["dense", "windows", "sinks", "quoka"],
)
def test_it_goes_on_after_each_chunk(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    plan = _plan(family, **changes)
    expected, whole = _fresh(plan, tmp_path / "fresh.skv"), len(plan.prompt.input_ids)
    folder = tmp_path / "killed.skv"
    for tokens in range(CHUNK, whole - 1, CHUNK):  # the same build, killed again and again
        _left(plan, folder, tokens)
    again, told = _rebuilt(plan, folder)
    assert again == whole - tokens - (not plan.config.prefill.exact)  # whose last token runs alone
    assert f"the first {tokens:,} are those that an interrupted build has prefilled" in told[-1]
    assert _sums(folder) == expected


def _interrupt(plan: BuildPlan, folder: Path) -> None:
    """Begin a build, and interrupt it after three chunks of its prefill."""

    def stop(stage: str, done: int, of: int) -> None:
        if done == 3 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(plan, folder, stop)


def test_it_goes_on_after_an_exception(tmp_path: Path) -> None:
    plan = _plan()
    expected = _fresh(plan, tmp_path / "fresh.skv")

    _interrupt(plan, tmp_path / "b.skv")
    assert _rebuilt(plan, tmp_path / "b.skv")[0] == len(plan.prompt.input_ids) - 3 * CHUNK
    assert _sums(tmp_path / "b.skv") == expected


def test_it_goes_on_where_rows_have_other_sizes_than_the_config_says(tmp_path: Path) -> None:
    """JetMoe attends to its keys once for each expert of a token. Its chunks were taken for damaged ones."""
    model = tiny_model(tiny_config("jetmoe"))
    plan = _plan(methods={"multipole": INDEXERS["multipole"]})
    plan = replace(plan, loaded=replace(plan.loaded, model=model))
    expected = _fresh(plan, tmp_path / "fresh.skv")

    _interrupt(plan, tmp_path / "b.skv")
    told = list[str]()
    build_index(plan, tmp_path / "b.skv", tell=told.append)
    assert f"the first {3 * CHUNK} are those that an interrupted build has prefilled" in told[-1]
    assert _sums(tmp_path / "b.skv") == expected


@pytest.mark.parametrize("stage", ["write context", "index multipole"])
def test_what_is_written_after_it_costs_no_more_than_a_chunk(tmp_path: Path, stage: str) -> None:
    plan = _plan()
    expected = _fresh(plan, tmp_path / "fresh.skv")
    _killed(plan, tmp_path / "b.skv", _after(1, tmp_path / "b.skv", stage))
    assert _rebuilt(plan, tmp_path / "b.skv")[0] <= CHUNK
    assert _sums(tmp_path / "b.skv") == expected


def test_it_goes_on_wherever_it_was_killed(tmp_path: Path) -> None:
    plan, random = _plan(chunk_size=16), Random(0)
    began = time.monotonic()
    expected = _fresh(plan, tmp_path / "fresh.skv")
    seconds = time.monotonic() - began
    for number in range(3):
        folder = tmp_path / f"{number}.skv"
        for _ in range(2):
            _killed(plan, folder, lambda stage, done, of: None, random.uniform(0, seconds))
        build_index(plan, folder)
        assert _sums(folder) == expected


def _some_slow(cases: dict[str, Any], *fast: str) -> list[Any]:
    return [pytest.param(one, id=name, marks=() if name in fast else pytest.mark.slow) for name, one in cases.items()]


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _only(folder: Path, pattern: str) -> Path:
    return next(folder.glob(pattern))


def _link(folder: Path) -> None:
    path = _only(folder, "context/layer_001*.tmp")
    path.symlink_to(path.rename(folder.parent / "elsewhere"))


def _second_name(folder: Path) -> None:
    path = _only(folder, "context/layer_000*.tmp")
    os.link(path, folder.parent / "elsewhere")


def _edit_note(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    journal = json.loads((folder / JOURNAL).read_text())
    change(journal["notes"]["prefill"])
    (folder / JOURNAL).write_text(json.dumps(journal))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a row": lambda folder: _flip(_only(folder, "context/layer_001*.tmp"), 3000),
    "a header": lambda folder: _flip(_only(folder, "context/layer_001*.tmp"), 20),
    "cut rows": lambda folder: os.truncate(_only(folder, "context/layer_001*.tmp"), 5000),
    "no rows": lambda folder: _only(folder, "context/layer_001*.tmp").unlink(),
    "queries": lambda folder: _flip(_only(folder, "kept/*.tmp"), 3000),
    "cut queries": lambda folder: os.truncate(_only(folder, "kept/*.tmp"), 100),
    "a link": _link,
    "a second name": _second_name,
    "ends": lambda folder: _edit_note(folder, lambda note: note.update(ends=[CHUNK, 2 * CHUNK + 1])),
    "huge ends": lambda folder: _edit_note(folder, lambda note: note.update(ends=[CHUNK, 2**31 - 1])),
    "huge queries": lambda folder: _edit_note(folder, lambda note: note.update(queries=[1, 2**62])),
    "no layers": lambda folder: _edit_note(folder, lambda note: note.update(rows={})),
    "a note": lambda folder: _edit_note(folder, lambda note: note.update(ends="x")),
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a killed build with two chunks, and a finished one."""
    folder = tmp_path_factory.mktemp("left")
    _left(_plan(), folder / "killed.skv")
    build_index(_plan(), folder / "fresh.skv")
    return folder


@pytest.mark.parametrize("damage", _some_slow(DAMAGES, "a row", "queries", "a link"))
def test_what_is_damaged_is_not_used(left: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    plan, folder, outside = _plan(), tmp_path / "b.skv", tmp_path / "elsewhere"
    shutil.copytree(left / "killed.skv", folder)
    damage(folder)
    before = outside.read_bytes() if outside.exists() else b""
    again, told = _rebuilt(plan, folder)
    assert again == len(plan.prompt.input_ids)
    assert "are those that an interrupted build has prefilled" not in told[-1]
    assert _sums(folder) == _sums(left / "fresh.skv")
    assert (outside.read_bytes() if outside.exists() else b"") == before


def _dtype(plan: BuildPlan) -> BuildPlan:
    other = _plan()
    other.loaded.model.to(torch.bfloat16)
    return other


OTHERS: dict[str, Callable[[BuildPlan], BuildPlan]] = {
    "document": lambda plan: _plan(text="Another text. " * 50),
    "model": lambda plan: _plan("qwen3"),
    "dtype": _dtype,
    "sinks": lambda plan: with_changes(plan, sinks=5),
    "tail": lambda plan: with_changes(plan, tail=20),
    "prefill": lambda plan: with_changes(plan, prefill=QuokaPrefill(prefill_budget=32, prefill_queries=4)),
    "storage": lambda plan: with_changes(plan, kv_dtype="int8"),
    "sample": lambda plan: with_changes(plan, methods={"h2o": INDEXERS["h2o"]}),
}


@pytest.mark.parametrize("other", _some_slow(OTHERS, "document", "model"))
def test_another_build_begins_anew(tmp_path: Path, other: Callable[[BuildPlan], BuildPlan]) -> None:
    plan, folder = _plan(), tmp_path / "b.skv"
    _left(plan, folder)
    changed = other(plan)
    again, told = _rebuilt(changed, folder)
    assert again == len(changed.prompt.input_ids) - (not changed.config.prefill.exact)
    assert any("of another text or with other settings" in line for line in told)
    assert _sums(folder) == _fresh(changed, tmp_path / "fresh.skv")


def test_other_chunks_go_on(tmp_path: Path) -> None:
    """As rows of a dense prefill do not depend on chunks."""
    plan = _plan()
    _left(plan, tmp_path / "b.skv")
    again, _ = _rebuilt(with_changes(plan, chunk_size=50), tmp_path / "b.skv")
    assert again == len(plan.prompt.input_ids) - 2 * CHUNK


def test_a_longer_text_goes_on_behind_what_the_index_has(tmp_path: Path) -> None:
    folder, fresh, longer = tmp_path / "b.skv", tmp_path / "fresh.skv", _plan(tokens=560)
    for one in (folder, fresh):
        build_index(_plan(tokens=280), one)
    build_index(longer, fresh)
    _killed(longer, folder, _after(256 + CHUNK, folder))
    assert Artifact(folder).manifest.split.tokens < 300
    assert _rebuilt(longer, folder)[1][-1].startswith(f"{len(longer.prompt.input_ids) - 256 - CHUNK:,} of ")
    assert _sums(folder) == _sums(fresh)


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    build_index(_plan(kv_dtype="int8"), tmp_path / "b.skv", tell=told.append)
    assert told[0].endswith("; an interrupted prefill begins anew")
