"""Whatever fails, in the machine, in a library or in this program, is one line with a remedy and an exit code."""

import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.command import EXECUTABLE, environment, fails, run_here, shell, sparsekv, start

from sparsekv.cli import main
from sparsekv.cli.common.commands import COMMANDS
from sparsekv.cli.common.failures import LESS_MEMORY, REMEDIES, describe
from sparsekv.formats.distributed import process
from sparsekv.formats.documents.document import read_document
from sparsekv.formats.errors import SparsekvError, UsageError

CPU = "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a.skv/x"), ("a.skv/x: no space left on device; make room",)),
        (PermissionError(errno.EACCES, "Permission denied", "a"), ("a: permission denied; give yourself permission",)),
        (OSError(errno.ENAMETOOLONG, "File name too long", "n"), ("n: file name too long; give a shorter name",)),
        (OSError(errno.EXDEV, "Invalid link", "a", None, "b"), ("a and b: invalid link; check it",)),
        (OSError(errno.ENOMEM, "Cannot allocate memory", "a"), ("not enough memory", "ulimit -v")),
        (MemoryError(), ("not enough memory", "--placement disk")),
        (RuntimeError(CPU), ("not enough memory",)),
        (RuntimeError("unable to mmap 5 bytes from file <x>: Cannot allocate memory (12)"), ("not enough memory",)),
        (RuntimeError("std::bad_alloc"), ("not enough memory",)),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), ("not enough memory",)),
        (ImportError("No module named 'x'"), ("installation cannot be loaded: No module named 'x'", "install")),
        (RuntimeError("can't start new thread"), ("no more threads", "ulimit -u")),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), ("memory on the GPU", "--device cpu")),
        (
            RuntimeError("CUDA error: an illegal memory access\nFor debugging"),
            ("the GPU failed: CUDA error: an", "again"),
        ),
        (RuntimeError("Error in void faiss::Clustering::train()\nat x: Error: 'n' failed"), ("faiss", "--seed")),
        (RuntimeError("Could not determine home directory."), ("begins with ~", "whole path")),
        (RecursionError("maximum recursion depth exceeded"), ("nested too deeply", "files")),
        (
            TypeError("no\nsuch thing"),
            ("internal error: TypeError: no such thing; run it again as `sparsekv --debug` to see",),
        ),
        (OSError("could not get source code"), ("internal error: OSError: could not get source code",)),
    ],
)
def test_every_failure_has_its_line(error: Exception, says: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["sparsekv"])  # which an internal error names, and not pytest's
    message = describe(error, "generate")
    assert all(part in message for part in says), message
    assert len(message.splitlines()) == 1


def test_a_file_is_not_blamed_for_missing_memory() -> None:
    def blaming(below: Exception) -> SparsekvError:
        try:
            try:
                raise below
            except Exception as error:
                raise SparsekvError(f"the weights of model 'm' cannot be loaded: {error}") from None
        except SparsekvError as told:
            return told

    for below in (RuntimeError(CPU), MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert describe(blaming(below), "append").startswith("there is not enough memory on this machine; append less")
    assert "no more threads" in describe(blaming(RuntimeError("can't start new thread")), "append")
    assert describe(blaming(OSError("is cut")), "append") == "the weights of model 'm' cannot be loaded: is cut"


def test_remedies_name_options_that_the_command_has() -> None:
    assert LESS_MEMORY.keys() <= COMMANDS.keys()
    for command, remedy in LESS_MEMORY.items():
        shown = run_here(command, "--help").stdout
        options = [word.strip(",;") for word in remedy.split() if word.startswith("--")]
        assert all(f"{option} " in shown for option in options), (command, options)
    assert all(errno.errorcode[number] for number in REMEDIES)


NO_DOCUMENT = {
    "empty": (b"", "is empty"),
    "blank": (b" \n", "is empty"),
    "binary": (b"PK\0\0", "is not text: it contains zero bytes"),
    "latin-1": (b"caf\xe9", "is not text in UTF-8"),
    "short": (b"Two words.", "too short to index"),
}


@pytest.mark.parametrize(("data", "says"), NO_DOCUMENT.values(), ids=NO_DOCUMENT)
def test_every_document_that_cannot_be_one_is_wrong_usage(place: Path, data: bytes, says: str) -> None:
    """With one exit code, so that a script tells what to mend in its call from what failed."""
    Path("it").write_bytes(data)
    fails(2, "build-index", "it", "--model", "model", says=(says,))
    if says != "too short to index":  # any text can be appended
        fails(2, "append", "--index", "doc.skv", "it", "--rebuild", says=(says,))
        fails(2, "eval", "it", "--model", "model", says=(says,))


@pytest.mark.parametrize("given", [(), ("--sinks", "200")], ids=["", "sinks"])
def test_a_short_document_is_built_with_the_options_that_the_error_names(place: Path, given: tuple[str, ...]) -> None:
    Path("it").write_text("Two words.")
    build = ("build-index", "it", "--model", "model")
    error = run_here(*build, *given).error()
    assert "sinks and tail alone take" in error
    named, most = re.fullmatch(r".*; give a longer document, or give (.*) \(at most (\d+)\)", error).groups()  # type: ignore[union-attr]
    options = named.split()
    assert options[-2] == "--tail"
    assert ("--sinks" in options) == ("--sinks" in given)
    for tail, code in ((options[-1], 0), (most, 0), (f"{int(most) + 1}", 2)):
        built = run_here(*build, *options[:-1], tail)
        assert built.code == code, built.stderr


def test_a_document_that_may_not_be_read_is_wrong_usage(place: Path) -> None:
    """As a user whom permissions bind, which root is not."""
    place.chmod(0o755)
    Path("doc.txt").chmod(0)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        with pytest.raises(UsageError, match=r"cannot read doc\.txt: permission denied; make it readable"):
            read_document("doc.txt")
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(("command", "unbuffered"), [("--version", ""), ("--help", "1"), ("inspect -q", "1")])
def test_a_full_standard_output(place: Path, command: str, unbuffered: str) -> None:
    done = shell(f"PYTHONUNBUFFERED={unbuffered} sparsekv {command} > /dev/full", place)
    assert done.returncode == 1
    assert done.stderr == "sparsekv: error: standard output: no space left on device; make room there\n"


def test_closed_streams(place: Path) -> None:
    out = start("build-index", "doc.txt", "--model", "model", "-o", "new.skv", "-q", cwd=place, stdout=None).wait()
    assert (out.code, out.stderr) == (
        1,
        "sparsekv: error: standard output is closed; redirect it to a file or to /dev/null\n",
    )
    assert not (place / "new.skv").exists()
    stdin = start("generate", "-q", cwd=place, stdin=None).wait()
    assert (stdin.code, stdin.stderr.startswith("sparsekv: error: no question: give it as")) == (2, True)
    silent = start("generate", "--prompt-file", "none.txt", cwd=place, stderr=None).wait()
    assert (silent.code, silent.stdout) == (2, "")
    full = start("generate", "Why?", "--max-new-tokens", "2", "--stats", cwd=place, stderr="/dev/full").wait()
    assert (full.code, full.stdout.count("\n")) == (0, 1)


@pytest.mark.parametrize("megabytes", [300, 900])
def test_a_limit_on_memory(place: Path, megabytes: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    command = [EXECUTABLE, "generate", "Why?", "--max-new-tokens", "2", "-q"]
    done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, preexec_fn=limit)
    if done.returncode:
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert "not enough memory" in done.stderr
    else:
        assert megabytes > 600
        assert done.stderr == ""


def _socket(place: Path) -> None:
    os.mknod("it.skv", 0o140600)


@pytest.mark.parametrize(
    "make", [lambda place: os.mkfifo("it.skv"), _socket, lambda place: Path("it.skv").write_text("an index")]
)
def test_an_index_that_is_no_folder(place: Path, make: Callable[[Path], object]) -> None:
    make(place)
    for command in (("generate", "Why?"), ("inspect",), ("recall-report",), ("bench",)):
        outcome = run_here(*command, "--index", "it.skv")
        assert outcome.code == 2
        assert "--index it.skv is not a folder, and an index is a folder; name the folder" in outcome.error()


LONG = "n" * 300


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ("generate", "Why?", "--seed", str(2**64), "--temperature", "1"),
            2,
            (f"--seed {2**64}: give a whole number",),
        ),
        (("generate", "Why?", "--temperature", "nan"), 2, ("--temperature nan: give a finite number",)),
        (("generate", "Why?", "--guard", "nan"), 2, ("--guard nan: give a finite number",)),
        (("generate", "Why?", "--top-p", "inf"), 2, ("--top-p inf: give a finite number",)),
        (("generate", "Why?", "--budget", "nan"), 2, ("--budget nan",)),
        (("generate", "Why?", "--max-new-tokens", "-1"), 2, ("--max-new-tokens -1",)),
        (("recall-report", "--within", "nan"), 2, ("--within nan: give a finite number",)),
        (("tune", "--target-recall", "nan"), 2, ("--target-recall nan: give a finite number",)),
        (("eval", "doc.txt", "--depth", "nan"), 2, ("--depth nan: give a finite number",)),
        (("generate", "Wh\udcffy?"), 2, ("PROMPT Wh\\xffy? is not text in UTF-8",)),
        (("generate", "Why?", "--method", "\udcff"), 2, ("--method \\xff is not text in UTF-8",)),
        (("generate", "Why?", "--index", "a\udcff.skv"), 2, ("no index at a\\xff.skv",)),
        (("generate", "Why?", "--index", LONG), 2, ("file name too long", "build-index")),
        (("recall-report", "--plot", f"{LONG}.png"), 2, ("the name is too long; give a shorter one",)),
        (("recall-report", "--plot", "model"), 2, ("--plot model is a folder; give the name",)),
        (("inspect", "--plot", "clusters.nonsense"), 2, ("there is no image format with this extension", "png")),
        (("generate", "Why?", "--model", ""), 2, ("--model is empty; leave it out",)),
        (("build-index", "doc.txt", "--model", " "), 2, ("--model is empty; leave it out",)),
        (("tune", "--target-perplexity", "1.1", "--model", ""), 2, ("--model is empty; leave it out",)),
        (
            ("eval", "doc.txt", "--model", "~nouser/x"),
            2,
            ("model '~nouser/x': this machine has no such user", "full path"),
        ),
        (("models", "pull", "~nouser/x"), 2, ("~nouser/x", "hub")),
    ],
)
def test_values_that_nothing_can_be_made_of(
    place: Path, arguments: tuple[str, ...], code: int, says: tuple[str, ...]
) -> None:
    before = sorted(place.rglob("*"))
    outcome = run_here(*arguments)
    message = outcome.error()
    assert outcome.code == code, message
    assert all(part in message for part in says), message
    assert sorted(place.rglob("*")) == before


def test_tune_finds_an_index_that_cannot_be_written_before_it_measures(place: Path) -> None:
    """As a user whom permissions bind, which root is not; the target is one that measuring would refuse."""
    place.chmod(0o755)
    (place / "doc.skv").chmod(0o555)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        outcome = run_here("tune", "--target-recall", "0.9", "--method", "nonsense")
        measured = run_here("tune", "--target-recall", "0.9", "--method", "nonsense", "--dry-run")
    finally:
        os.seteuid(user)
        (place / "doc.skv").chmod(0o755)
    assert outcome.code == 1
    assert "doc.skv" in outcome.error()
    assert "--dry-run" in outcome.error()
    assert "'nonsense'" in measured.error()


def test_libraries_warnings_are_shown_to_who_asks_for_them_alone(place: Path) -> None:
    """A title in a script that matplotlib's font has not makes it warn."""
    (place / "doc.skv").rename(place / "漢字.skv")
    quiet, loud = (sparsekv(*debug, "inspect", "-q", "--plot", "x.png", cwd=place) for debug in ((), ("--debug",)))
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert "missing from" in loud.stderr


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (["--gpus", "2", "build-index", "doc.txt"], "build-index"),
        (["--debug", "append", "eval"], "append"),
        (["apend", "x.txt"], "apend"),
        ([], ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_called_is_found_behind_options(
    given: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sparsekv", *given])
    assert main._command() == command


def test_the_call_to_see_more_of_a_fault_is_the_whole_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["sparsekv", "--debug", "build-index", "doc.txt"])
    assert "run it again as `sparsekv --debug build-index doc.txt`" in describe(TypeError("x"), "build-index")
    for name, value in {process.FOLDER: str(tmp_path), "WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "`sparsekv --gpus 4 --debug build-index doc.txt`" in describe(TypeError("x"), "build-index")
