"""`generate --compile`."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.command import run_here

ASK = ("generate", "What is 7 times 7?", "--max-new-tokens", 6, "--model", "model", "--stats")


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_layers_give_the_same_answer(place: Path) -> None:
    # Without asking what the CPU can do; what all programs include, which is most of their compiling, is compiled once.
    with torch._inductor.config.patch({"cpp.simdlen": 0, "cpp_cache_precompile_headers": True}):
        plain, compiled = (run_here(*ASK, "--compile", mode) for mode in ("off", "on"))
    assert plain.code == compiled.code == 0, compiled.stderr
    assert plain.stdout == compiled.stdout
    assert "compiled in" in compiled.stderr
    assert "compiled in" not in plain.stderr


@pytest.mark.parametrize("command", [ASK, ("chat", "--model", "model")], ids=["generate", "chat"])
def test_without_a_compiler_one_line_says_so(
    place: Path, command: tuple[str | int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
    with torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/c++")}):
        refused = run_here(*command, "--compile", "on")
    assert refused.code == 1
    assert "the model's layers cannot be compiled here: " in refused.stderr
    assert refused.stderr.rstrip().endswith("use --compile off")


@pytest.mark.parametrize("command", [ASK, ("chat",), ("serve", "doc.skv")], ids=["generate", "chat", "serve"])
def test_an_unknown_mode_is_refused(place: Path, command: tuple[str | int, ...]) -> None:
    refused = run_here(*command, "--compile", "maybe")
    assert (refused.code, refused.stderr) == (2, "sparsekv: error: --compile maybe: choose one of auto, on, off\n")
