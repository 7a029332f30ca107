"""A compiled decode step is read from disk only while none of the files that it was compiled from has changed."""

from pathlib import Path

import pytest
from numba import cfunc, types
from support.house import ROOT, files, imports

from sparsekv.kernels.attention import compiled_step_numba


def test_the_version_is_of_every_file_that_is_compiled(tmp_path: Path) -> None:
    for path in (ROOT / "kernels").rglob("*_numba.py"):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        (tmp_path / path.parent.name / path.name).write_bytes(path.read_bytes())
    version = compiled_step_numba.sources(tmp_path)
    assert version == compiled_step_numba.VERSION
    for path in tmp_path.rglob("*_numba.py"):
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        assert compiled_step_numba.sources(tmp_path) != version
        path.write_bytes(before)


def test_compiled_files_call_none_but_those() -> None:
    compiled = {name for name in files() if name.endswith("_numba")}
    assert all(name.startswith("kernels/") for name in compiled)
    assert {other for name in compiled for other in imports()[name]} <= compiled


def test_numba_compiles_anew_for_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))

    def hits(version: int) -> int:
        def step(job):  # type: ignore[no-untyped-def]
            _ = version

        return int(cfunc(types.void(types.voidptr), cache=True)(step).cache_hits)

    assert [hits(1), hits(1), hits(2)] == [0, 1, 0]
